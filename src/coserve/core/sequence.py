"""Sequences and micro-batches: tokens with their progress through the model.

A `Sequence` is a prompt being answered: `computed` of its `length` tokens are in pages, and the next steps
pass the rest through the model, one token (decode) or many (prefill).

A `MicroBatch` is some training examples of one job, packed end to end into rows. It passes the layers forward
(activations are stored), then the tail and its loss, then backward, in *windows* of rows, which can pause
between any two layers (FlexLLM 6.1, algorithm 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final

from coserve.core.request import BASE, FinishReason, Request
from coserve.core.speculation import PromptLookup


class Direction(Enum):
    """Pass of a segment's rows through the layers of its span."""

    INFER = "infer"  # forward, keys and values into pages, nothing kept for a gradient
    TRAIN_FORWARD = "train_forward"  # forward, what the backward pass needs is stored
    LOGPROBS = "logprobs"  # through the tail, for log-probabilities alone
    LOSS = "loss"  # through the tail (final norm, head, loss) and back to the last layer's output
    BACKWARD = "backward"  # last layer of the span first

    @property
    def is_tail(self) -> bool:
        """Tells whether rows pass the tail instead of layers."""
        return self in (Direction.LOGPROBS, Direction.LOSS)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Loss of a micro-batch: its name in `train.losses`, and named `inputs` with a number for each row. For a
    loss that `couples` tokens rows pass the tail twice: for log-probabilities, then for the loss. One of
    several `candidates` takes the log-probabilities of these tokens, equally many for each row one after
    another, in place of the label's, and has a number for each of them in its inputs."""

    name: str = "cross_entropy"
    inputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    couples: bool = False
    candidates: tuple[int, ...] = ()


CROSS_ENTROPY: Final = LossSpec()  # every label weighs one


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [first, last)."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


def stage_spans(layers: int, stages: int) -> list[Span]:
    """The layers of each stage of a pipeline: equally many, but for one."""
    edges = [number * layers // stages for number in range(stages + 1)]
    return [Span(first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """Pages of a preempted sequence in the second tier: `pages` of its block table from `first` on, of which
    the copies `numbers` have `each` in turn, the last one the rest. With the pages before them they hold its
    first `tokens` tokens."""

    numbers: tuple[int, ...]
    each: int
    first: int
    pages: int
    tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A request being answered. `key` is unique in the engine's life; `pages` are in the order of positions.
    A worker has one of its own, with what plans have told of it: its request, tokens and pages.

    `output` may begin with tokens of another engine, which count like any others.

    The first `shared` of its `pages` are read-only: they hold virtual tokens of the adapter version and
    cached tokens (`schedule.prefixes`). The cached beginning may end within a page: the first own page then
    begins with a copy of page `template`, or is that page if it has no other reader. For a waiting sequence,
    `computed` are the tokens found in the cache.

    A preempted sequence may be `swapped` to the second tier, and its beginning may be found there. While such
    copies (names) are `loading`, it has pages and no rows; afterwards `filled` of them, after the shared
    ones, hold what was computed before.

    All `pages` of an `offloaded` sequence are in slower memory: the device's are too few for it. It has all
    that it will need from the start, shares none, and is not preempted.

    Plans under way count as done: their rows are `computed`, and the tokens that they will sample are counted
    in `length` and `unsampled`. Of rows with drafts only the first counts, until the result tells how many of
    them hold: meanwhile the sequence gets no further rows.
    """

    key: int
    request: Request
    output: list[int] = field(default_factory=list)
    offloaded: bool = False
    unsampled: int = 0  # tokens at its end that plans under way will sample
    expected_at: float | None = None  # when the last of these is predicted to come
    under_way: int = 0  # segments of it in plans whose results have not come
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    template: int | None = None
    told: int | None = None  # of its pages, those the executor knows; None where it holds no state of it
    named: int = 0  # pages, from the first on, that are full
    names: list[bytes] = field(default_factory=list)  # of full pages with tokens of its own, if worked out
    cached: int | None = None  # tokens of the prompt that were found when it first ran
    preemptions: int = 0
    swapped: SwapCopy | None = None
    loading: tuple[int | bytes, ...] = ()
    filled: int = 0
    reached: int = 0  # tokens computed before it was last preempted: those below are computed again
    deferred: float = 0.0  # seconds that training has delayed this request so far
    deferred_first: float = 0.0  # the same when its first token came
    admitted_at: float | None = None
    first_token_at: float | None = None
    taken_over_at: float | None = None  # by this engine, from another that had answered a part
    last_token_at: float | None = None
    slowest: float = 0.0  # longest time between two of its tokens so far, seconds
    reported: int = 0  # rows of the prompt whose log-probabilities have been handed out
    finish_reason: FinishReason | None = None
    lookup: PromptLookup | None = None  # what drafts its next tokens, where that is asked for

    @property
    def known(self) -> int:
        """Tokens known so far: the prompt's and the answer's."""
        return len(self.request.prompt) + len(self.output)

    @property
    def length(self) -> int:
        """Known tokens, and those that plans under way will sample."""
        return len(self.request.prompt) + len(self.output) + self.unsampled

    @property
    def newest_at(self) -> float | None:
        """Time of its newest token, real or predicted; None before the first."""
        return self.expected_at if self.unsampled else self.last_token_at

    @property
    def since_first(self) -> float | None:
        """Start of the time after its first token in this engine: that token's time, or the time when the
        answer was taken over; None before."""
        return self.first_token_at if self.taken_over_at is None else self.taken_over_at

    @property
    def virtual(self) -> int:
        """Positions before its first token."""
        return self.request.traits.virtual

    @property
    def remaining(self) -> int:
        """Tokens to pass through the model before the next one can be sampled; 0 where none follows the
        unsampled ones, while its pages are read from the second tier, and while drafts are verified."""
        if self.loading or (self.lookup is not None and self.lookup.under_way):
            return 0
        # Not by `length`: this is asked several times for each row of a step.
        answered = len(self.output) + self.unsampled
        if self.unsampled and answered >= self.request.sampling.max_tokens:
            return 0
        return len(self.request.prompt) + answered - self.computed

    @property
    def longest(self) -> int:
        """Most tokens of this sequence; the last one sampled never enters the cache."""
        return len(self.request.prompt) + max(self.request.sampling.max_tokens, 1)

    @property
    def steps_left(self) -> int:
        """Most tokens still to be answered, at least one."""
        return max(self.request.sampling.max_tokens - len(self.output) - self.unsampled, 1)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def decodes(self, start: int) -> bool:
        """Tells whether a row of the token at `start` is a decode row: of the newest token of an answer."""
        prompt = len(self.request.prompt)
        return start == prompt + len(self.output) + self.unsampled - 1 >= prompt

    def tokens(self, start: int, length: int, drafts: tuple[int, ...] = ()) -> list[int]:
        """Token ids at positions [start, start + length), with `drafts` behind those known."""
        prompt = self.request.prompt
        if drafts and (known := min(self.known - start, length)) < length:
            drafted = drafts[start + max(known, 0) - self.known : start + length - self.known]
            return [*(self.tokens(start, known) if known > 0 else ()), *drafted]
        if start >= len(prompt):
            return self.output[start - len(prompt) : start - len(prompt) + length]
        if start + length <= len(prompt):
            return list(prompt[start : start + length])
        return [*prompt[start:], *self.output[: start + length - len(prompt)]]


@dataclass(frozen=True, slots=True)
class PausedWindow:
    """Rows [start, start + rows) paused between two layers. Forward, `layer` runs next; backward, `layer -
    1`."""

    start: int
    rows: int
    layer: int


Position = tuple[Direction, int, tuple[PausedWindow, ...], bool]


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Training examples of one job packed end to end, and their progress forward and backward.

    `lengths` are the examples' rows, with `padding` rows at the end (see `core.row_buckets`). `layers` is the
    model's depth. Forward, rows start from the left: those before `frontier` have started. Then all pass the
    tail, again from the left and in windows of their own: with a large vocabulary one row's loss takes as
    long as several layers. Backward, rows start from the right: those from `frontier` on have started.

    `tokens` and `labels` have an entry for each row, or are empty where only counts matter. `step_labels`
    counts the labels of the whole optimizer step, and `dropout_seed` seeds dropout. One that is
    `forward_only` passes the tail for log-probabilities, and is done. For `reports`, `pass_number`,
    `reference` and `top_k` see `core.plan.MicroBatchStart`.

    An adapter's virtual tokens precede every example: `prefix` of them as given keys and values, then
    `prompt` as rows. Those rows are the first of `lengths`, once for all examples.

    `paused` are the windows paused between two layers, the next one to run last. A paused window may be
    *cut*: the part that the other depends on (the left one forward, the right one backward) goes on, the rest
    stays. So a long window chosen in an idle moment never prevents short ones.

    Plans under way count as done; `rewind` takes back what a pause prevented.
    """

    key: int
    job: str
    adapter: str  # the version that is being trained from
    lengths: tuple[int, ...]
    layers: int
    padding: tuple[int, ...] = ()
    prefix: int = 0
    prompt: int = 0
    base: str = BASE
    tokens: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    step_labels: int = 1
    dropout_seed: str = ""
    loss: LossSpec = CROSS_ENTROPY
    forward_only: bool = False
    reports: bool = False
    pass_number: int = 0
    reference: bool = False
    top_k: int = 0
    direction: Direction = Direction.TRAIN_FORWARD
    frontier: int = 0
    paused: list[PausedWindow] = field(default_factory=list)
    done: bool = False
    told: bool = False  # whether a plan has named it
    under_way: int = 0  # segments of it that are planned, and that nobody has said have run

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Directions in which its rows pass, in order."""
        if self.forward_only:
            return Direction.TRAIN_FORWARD, Direction.LOGPROBS
        first = (Direction.LOGPROBS,) if self.loss.couples else ()
        return Direction.TRAIN_FORWARD, *first, Direction.LOSS, Direction.BACKWARD

    @property
    def position(self) -> Position:
        """The progress, to be restored by `rewind`."""
        return self.direction, self.frontier, tuple(self.paused), self.done

    def rewind(self, position: Position) -> None:
        """Restores an earlier `position`."""
        self.direction, self.frontier, paused, self.done = position
        self.paused = [*paused]

    @property
    def length(self) -> int:
        """All rows of the micro-batch."""
        return sum(self.lengths)

    @property
    def has_begun(self) -> bool:
        """Tells whether any of its rows have passed a layer."""
        return self.direction is not Direction.TRAIN_FORWARD or self.frontier > 0

    @property
    def is_paused(self) -> bool:
        """Tells whether a window is paused between two layers; the next window is part of it."""
        return bool(self.paused)

    @property
    def rows_left(self) -> int:
        """The most rows that the next window can have."""
        if self.paused:
            return self.paused[-1].rows
        return self.frontier if self.direction is Direction.BACKWARD else self.length - self.frontier

    def next_window(self, rows: int) -> tuple[int, int]:
        """(start, rows) of the window to run next, of at most `rows` rows."""
        whole = self._next_whole()
        rows = min(rows, whole.rows)
        from_right = self.direction is Direction.BACKWARD
        return (whole.start + whole.rows - rows if from_right else whole.start), rows

    def next_span(self, layers: int) -> Span:
        """The layers to run next, at most `layers` of them; the tail counts as one more layer on top."""
        layer = self._next_whole().layer
        if self.direction.is_tail:
            return Span(layer, layer + 1)
        if self.direction is Direction.TRAIN_FORWARD:
            return Span(layer, min(layer + layers, self.layers))
        return Span(max(layer - layers, 0), layer)

    def advance(self, start: int, rows: int, span: Span) -> None:
        """Records that rows [start, start + rows) have passed the layers of `span`."""
        assert (start, rows) == self.next_window(rows), "windows travel in order"
        assert span == self.next_span(len(span)), "layers run in order"
        whole = self._next_whole()
        forward = self.direction is not Direction.BACKWARD
        if self.paused:
            self.paused.pop()
            if rest := whole.rows - rows:
                self.paused.append(PausedWindow(start + rows if forward else whole.start, rest, whole.layer))
        else:
            self.frontier = start + rows if forward else start
        reached = span.last if forward else span.first
        if 0 < reached < self.layers:
            self.paused.append(PausedWindow(start, rows, reached))
        elif not self.paused and not self.rows_left:
            self._turn()

    def _next_whole(self) -> PausedWindow:
        """The window to take the next one from: the last paused one, else the rows that have not started."""
        if self.paused:
            return self.paused[-1]
        if self.direction is Direction.BACKWARD:
            return PausedWindow(0, self.frontier, self.layers)
        first = 0 if self.direction is Direction.TRAIN_FORWARD else self.layers
        return PausedWindow(self.frontier, self.length - self.frontier, first)

    def _turn(self) -> None:
        """Moves to the next direction once all rows have passed: to the tail, to backward, or to done."""
        following = self.directions[self.directions.index(self.direction) + 1 :]
        if not following:
            self.done = True
            return
        self.direction = following[0]
        self.frontier = self.length if self.direction is Direction.BACKWARD else 0
