"""A handle to one request's answer.

Iterating a handle steps the engine unless another thread does; handles of one engine can be iterated in turn
or from several threads.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import add

import msgspec

from coserve.core.events import TokenEvent
from coserve.core.plan import TokenLogprobs
from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence
from coserve.errors import CoserveError
from coserve.model.grammar import Grammar
from coserve.text.detokenize import TextStream
from coserve.wire.scores import numbers


class Delta(msgspec.Struct, frozen=True):
    """A piece of an answer: text that is safe to show, and the token behind it (None for held-back text)."""

    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None


class Completion:
    """One request's answer. Iterate it for deltas, or call `result`; both raise the `error` of a request that
    failed because its adapter could not be loaded."""

    def __init__(
        self,
        sequence: Sequence,
        text: TextStream | None,
        drive: Callable[[], bool],
        cancel: Callable[[], None],
        grammar: Grammar | None = None,
        alternative: int = 0,
    ) -> None:
        """`grammar` is the one that the answer has to match, held until it ends. `alternative` is the adapter
        that answers, at present: 0 is the one asked for, numbers from 1 on are the alternatives to it."""
        self.sequence = sequence
        self.alternative = alternative
        self.changes: list[tuple[int, int]] = []  # of chains: tokens answered until then, and the alternative
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.stopped = False  # the text has a stop string
        self.embedding = array("f")  # of a prompt that is pooled, once it is complete
        self.finish_reason: FinishReason | None = None
        self.error: CoserveError | None = None
        self._stream = text
        self._taken = len(sequence.request.continued)  # tokens
        self._drive, self._cancel = drive, cancel
        self._grammar = grammar
        self._deltas: deque[Delta] = deque()
        self._sum = array("d")  # of rows that are pooled

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.sequence.output

    def __iter__(self) -> Iterator[Delta]:
        while True:
            while self._deltas:
                yield self._deltas.popleft()
            if self.finish_reason is not None or not self._drive():
                while self._deltas:  # another thread may have reached the end meanwhile
                    yield self._deltas.popleft()
                self._raise()
                return

    def result(self) -> "Completion":
        """Runs the engine until the answer is complete."""
        while self.finish_reason is None and self._drive():
            pass
        self._raise()
        return self

    def cancel(self) -> None:
        """Ends the answer; its resources are free after one step."""
        self._cancel()

    def change(self, alternative: int) -> None:
        """Notes that another alternative goes on with the answer."""
        self.alternative = alternative
        self.changes.append((len(self.tokens) + self.sequence.unsampled, alternative))

    def skip(self, tokens: Iterable[int]) -> bool:
        """Skips tokens that the caller has already; True if they contain a stop string."""
        if self._stream is None:
            return False
        for token in tokens:
            self._stream.push(token)
        self.stopped = self._stream.stopped
        return self.stopped

    def take(self, event: TokenEvent) -> bool:
        """Appends a token; True if it completes a stop string, which ends the answer. What the same step
        brought behind it is no part of it."""
        self.prompt_logprobs += event.prompt_logprobs
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.pooled:
            self._pool(numbers("f", event.pooled), event.restarts)
        if event.token is None:
            return False
        stream = self._stream
        self._add(Delta("" if stream is None else stream.push(event.token), event.token, event.logprobs))
        self._taken += 1
        if stream is not None and stream.stopped:
            self.stopped = True
            del self.sequence.output[self._taken :]
        return self.stopped

    def finish(self, reason: FinishReason, error: CoserveError | None = None) -> None:
        """Marks the answer as ended, by `error` if it failed."""
        if self._stream is not None:
            self._add(Delta(self._stream.finish()))
        if self._sum and reason is not FinishReason.CANCELLED:
            rows = len(self.sequence.request.prompt)
            count = rows if self.sequence.request.sampling.pooling == "mean" else 1
            self.embedding = array("f", (value / count for value in self._sum))
        self.finish_reason, self.error = reason, error
        self._grammar = None

    def _pool(self, part: Iterable[float], restarts: bool) -> None:
        """Adds a part of the embedding; one that `restarts` replaces those before it."""
        is_first = restarts or not self._sum
        self._sum = array("d", part if is_first else map(add, self._sum, part))

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.text or delta.token is not None:
            self._deltas.append(delta)
