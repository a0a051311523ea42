"""Tokens with progress. Progress is a number, not a phase.

A `Sequence` is a prompt being answered: it has `computed` of its `length` tokens in pages, and whatever
is left is what the next steps must pass through the model, one token (decode) or many (prefill).

A `MicroBatch` is some training examples of one job, packed end to end into rows. It first travels forward
(rows are kept on the tape), then back. Its unit of travel is a *window* of rows, which can be put down
between any two layers and picked up again (FlexLLM 6.1, algorithm 2).
"""

from dataclasses import dataclass, field
from enum import Enum

from coserve.core.request import FinishReason, Request


class Direction(Enum):
    """Which way a segment's rows pass through the layers it spans."""

    INFER = "infer"  # forward, keys and values into pages, nothing kept for a gradient
    KEEP = "keep"  # forward, what the backward pass needs goes onto the tape
    BACKWARD = "backward"  # last layer of the span first


@dataclass(frozen=True, slots=True)
class Span:
    """Layers `first` to `last`, the last one excluded."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(slots=True, eq=False)
class Sequence:
    """A request being answered. `key` is unique in the engine's life; `pages` are in token order."""

    key: int
    request: Request
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    deferred: float = 0.0  # seconds that training has delayed this request so far
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    slowest: float = 0.0  # longest time between two of its tokens so far, seconds
    reported: int = 0  # rows of the prompt whose log-probabilities have been handed out
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt's and the answer's."""
        return len(self.request.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens that must pass through the model before the next one can be sampled."""
        return self.length - self.computed

    @property
    def longest(self) -> int:
        """Tokens this sequence can grow to; the last one sampled never enters the cache."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at positions `start` to `start + length`."""
        prompt = self.request.prompt
        if start >= len(prompt):
            return self.output[start - len(prompt) : start - len(prompt) + length]
        if start + length <= len(prompt):
            return list(prompt[start : start + length])
        return [*prompt[start:], *self.output[: start + length - len(prompt)]]


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Training examples of one job packed end to end, on their way through the model and back.

    `lengths` are the examples' rows; `layers` the model's depth. (`start`, `rows`, `layer`) is the window
    that is travelling: forward, `layer` is the next layer to run, and going back the next to run is
    `layer - 1` (before layer `layers - 1`, the tail: final norm, head and loss). `rows == 0` means no
    window has been picked up yet.
    """

    key: int
    job: str
    adapter: str  # the version that is being trained from
    lengths: tuple[int, ...]
    layers: int
    base: str = "base"
    direction: Direction = Direction.KEEP
    start: int = 0
    rows: int = 0
    layer: int = 0
    done: bool = False

    @property
    def length(self) -> int:
        """All rows of the micro-batch."""
        return sum(self.lengths)

    @property
    def is_put_down(self) -> bool:
        """Whether a window rests between two layers; its rows cannot be changed then."""
        return self.rows > 0

    @property
    def rows_left(self) -> int:
        """Rows that have not entered a window of the current direction."""
        return self.length - self.start if self.direction is Direction.KEEP else self.start

    def next_window(self, rows: int) -> tuple[int, int]:
        """(start, rows) of the window to run next: the one put down, else a new one of at most `rows`."""
        if self.is_put_down:
            return self.start, self.rows
        rows = min(rows, self.rows_left)
        return (self.start, rows) if self.direction is Direction.KEEP else (self.start - rows, rows)

    def next_span(self, layers: int) -> Span:
        """The next layers to run, at most `layers` of them."""
        if self.direction is Direction.KEEP:
            return Span(self.layer, min(self.layer + layers, self.layers))
        return Span(max(self.layer - layers, 0), self.layer)

    def advance(self, start: int, rows: int, span: Span) -> None:
        """Records that rows [start, start + rows) have passed the layers of `span`."""
        assert (start, rows) == self.next_window(rows), "windows travel in order"
        if self.direction is Direction.KEEP:
            self._advance_forward(start, rows, span)
        else:
            self._advance_backward(start, rows, span)

    def _advance_forward(self, start: int, rows: int, span: Span) -> None:
        assert span.first == self.layer, "layers run in order"
        if span.last < self.layers:
            self.start, self.rows, self.layer = start, rows, span.last
            return
        self.start, self.rows, self.layer = start + rows, 0, 0
        if self.start == self.length:
            self.direction, self.layer = Direction.BACKWARD, self.layers

    def _advance_backward(self, start: int, rows: int, span: Span) -> None:
        assert span.last == self.layer, "layers run in order"
        if span.first > 0:
            self.start, self.rows, self.layer = start, rows, span.first
            return
        self.start, self.rows, self.layer = start, 0, self.layers
        self.done = start == 0
