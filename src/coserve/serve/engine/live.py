"""Live requests, which continue across engine restarts."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from coserve.core.request import Request
from coserve.errors import CoserveError
from coserve.serve.engine.probation import WorkItem
from coserve.wire.messages import Token


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way, and its tokens so far. `folders` have the files of its adapter and of the
    alternatives that are adapters, by key: every engine loads them on first use."""

    request: Request
    folders: Mapping[str, Path]
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
    def versions(self) -> tuple[str | None, ...]:
        """Keys of the versions that an engine needs: that of the answer so far, or those of the adapter and
        its alternatives."""
        known = (self.request.adapter, *self.request.alternatives)
        return known if self.alternative is None else (known[self.alternative],)

    def submission(self, is_loaded: Callable[[str], bool]) -> Request:
        """The message for an engine, with the alternatives that it has loaded."""
        request = self.request
        sampling = request.sampling
        if self.tokens:  # the first token came after the whole prompt had been scored
            sampling = replace(sampling, prompt_logprobs=None)
        adapter, *others = self.versions
        there = [(place, key) for place, key in enumerate(others, 1) if key is None or is_loaded(key)]
        self._offered = (self.alternative or 0, *(place for place, _ in there))
        return structs.replace(
            request,
            sampling=sampling,
            adapter=adapter,
            alternatives=tuple(key for _, key in there),
            continued=tuple(self.tokens),
            arrival=request.arrival - time.monotonic(),
        )

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
