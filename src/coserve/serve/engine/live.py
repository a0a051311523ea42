"""Live requests, which continue across engine restarts."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from coserve.core.request import SLO, SamplingParams
from coserve.errors import CoserveError
from coserve.serve.engine.probation import WorkItem
from coserve.wire.messages import Submit, Token


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for one answer of the engine.

    `sampling.seed` must be set, so that another engine can continue the answer. `folder` has the files of
    `adapter`; every engine loads it on first use. `age` is the seconds that the request had waited on
    submission. Requests with the same `scope` share cached prefixes.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    slo: SLO = field(default_factory=SLO)
    adapter: str | None = None
    folder: Path | None = None
    age: float = 0.0
    scope: str | None = ""
    newcomer: bool = False  # its tenant has used less than its share

    @property
    def asks(self) -> int:
        """A key equal for requests that differ in id and seed only."""
        return hash((self.prompt, self.adapter, repr(replace(self.sampling, seed=None))))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way, and its tokens so far."""

    request: AnswerRequest
    began: float  # on the loop's clock
    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # prompt positions whose log-probabilities have come
    repeated: int = 0  # of these, how many the present engine will tell once more
    lives: int = 0
    arrived: asyncio.Queue[Token | CoserveError] = field(default_factory=asyncio.Queue)

    @property
    def item(self) -> WorkItem:
        return WorkItem("request", self.request.id)

    def submission(self, now: float) -> Submit:
        request = self.request
        sampling = request.sampling
        if self.tokens:  # the first token came after the whole prompt had been scored
            sampling = replace(sampling, prompt_logprobs=None)
        return Submit(
            request.id, request.prompt, sampling, request.slo, request.adapter,
            tuple(self.tokens), request.age + now - self.began, request.scope,
            request.newcomer,
        )  # fmt: skip

    def take(self, token: Token) -> None:
        if self.repeated and token.prompt_logprobs:
            known = min(self.repeated, len(token.prompt_logprobs))
            self.repeated -= known
            token = Token(
                token.id,
                token.token,
                token.logprobs,
                token.prompt_logprobs[known:],
                token.finish,
                token.fault,
                token.cached,
            )
        self.scored += len(token.prompt_logprobs)
        if token.token is not None:
            self.tokens.append(token.token)
        self.lives = 0
        self.arrived.put_nowait(token)
