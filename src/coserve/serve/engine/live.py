"""Live requests, which continue across engine restarts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from coserve.core.request import BASE, SLO, SamplingParams
from coserve.errors import CoserveError
from coserve.serve.engine.probation import WorkItem
from coserve.wire.messages import Submit, Token


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for one answer of the engine.

    `sampling.seed` must be set, so that another engine can continue the answer. `folder` has the files of
    `adapter`, which every engine loads on first use. `alternatives` are keys with folders, the most accurate
    first (the base has no key, and a chain of two bases no folder), one of which may answer in the adapter's
    place. `age` is the seconds that the
    request had waited on submission. Requests with the same `scope` share cached prefixes.
    `base` is the id of the base that answers.
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
    alternatives: tuple[tuple[str | None, Path | None], ...] = ()
    base: str = BASE

    @property
    def asks(self) -> int:
        """A key equal for requests that differ in id and seed only."""
        return hash((self.prompt, self.base, self.adapter, repr(replace(self.sampling, seed=None))))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way, and its tokens so far."""

    request: AnswerRequest
    began: float  # on the loop's clock
    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # prompt positions whose log-probabilities have come
    repeated: int = 0  # of these, those that the present engine reports once more
    lives: int = 0
    alternative: int | None = None  # the version that answers, once known: 0 is the adapter asked for
    _offered: tuple[int, ...] = (0,)  # numbers of the versions that the present engine chooses from
    arrived: asyncio.Queue[Token | CoserveError] = field(default_factory=asyncio.Queue)

    @property
    def item(self) -> WorkItem:
        return WorkItem("request", self.request.id)

    @property
    def versions(self) -> tuple[tuple[str | None, Path | None], ...]:
        """Keys and folders of the versions that an engine needs: that of the answer so far, or those of the
        adapter and its alternatives."""
        request = self.request
        known = ((request.adapter, request.folder), *request.alternatives)
        return known if self.alternative is None else (known[self.alternative],)

    def submission(self, now: float, is_loaded: Callable[[str], bool]) -> Submit:
        """The request for an engine, with the alternatives that it has loaded."""
        request = self.request
        sampling = request.sampling
        if self.tokens:  # the first token came after the whole prompt had been scored
            sampling = replace(sampling, prompt_logprobs=None)
        (adapter, _), *others = self.versions
        there = [(place, key) for place, (key, _) in enumerate(others, 1) if key is None or is_loaded(key)]
        self._offered = (self.alternative or 0, *(place for place, _ in there))
        return Submit(
            request.id, request.prompt, sampling, request.slo, adapter,
            tuple(self.tokens), request.age + now - self.began, request.scope,
            request.newcomer, tuple(key for _, key in there), request.base,
        )  # fmt: skip

    def take(self, token: Token) -> None:
        self.alternative = self._offered[token.alternative]  # another engine goes on with this version
        if token.alternative != self.alternative:
            token = structs.replace(token, alternative=self.alternative)
        if self.repeated and token.prompt_logprobs:
            known = min(self.repeated, len(token.prompt_logprobs))
            self.repeated -= known
            token = structs.replace(token, prompt_logprobs=token.prompt_logprobs.rows(known))
        self.scored += len(token.prompt_logprobs)
        if token.token is not None:
            self.tokens.append(token.token)
        self.lives = 0
        self.arrived.put_nowait(token)
