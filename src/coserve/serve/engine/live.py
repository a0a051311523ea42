"""One request that is being answered, through engines that die and are replaced."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from coserve.core.request import SLO, SamplingParams
from coserve.errors import CoserveError
from coserve.serve.engine.probation import WorkItem
from coserve.wire.messages import Submit, Token


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One answer wanted from the engine.

    `sampling.seed` is set: without it an answer could not go on in another engine. `folder` is where the
    adapter `adapter` lies; every engine loads it from there when it first needs it. `age` is how many seconds
    the request had waited when it was handed in. `scope` is whose prompts it may share the cache with.
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
        """Equal for requests that ask the same, whatever their ids and seeds."""
        return hash((self.prompt, self.adapter, repr(replace(self.sampling, seed=None))))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way, and the tokens that came so far."""

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
