"""Speculation over blocks on several modelled devices (BlockLLM, 5.2 and 7.3): what it does to latencies.

A chain of blocks, each on a device of its own, which computes all tokens that wait for it at once. A token
passes the blocks one after the other, and an answer's next one begins where the last one has ended. The
bottleneck's surrogate predicts its output, with which the next block goes on meanwhile; what that makes of it
is passed on once the bottleneck has shown that the prediction holds, and is computed again where it does not.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from typing import Final

from coserve.cluster.speculation import RowsAhead, SpeculationStep
from coserve.core.plan import BasePlan, InferenceSegment
from coserve.core.sequence import Span
from coserve.simulate.counting import PlanCounter
from coserve.simulate.hardware import Roofline
from coserve.simulate.intervals import percentile
from coserve.workload.arrivals import poisson_times
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.simulation.papers.statement import FigureTable, Say, Statement, size

BLOCKS: Final = (3, 3, 3, 8, 4, 4, 4, 3)  # layers of LLaMA-7B
BOTTLENECK: Final = 3  # the block of most layers: one of the slowest tenth (7.1)
RIGHT: Final = 192 / 231  # predictions that were accurate enough (7.3)
SPEEDUP: Final = 22.91  # of a transformer block's surrogate (table 4)
IDEAL: Final = 50.0  # of their pseudo surrogates (7.3)
ANSWER: Final = 64  # tokens
_LINK: Final = 12.5e9  # bytes a second between servers: 100 Gb/s
_MESSAGE: Final = 1e-4  # seconds
_CONTEXT: Final = 320  # tokens that a row attends to
_BUSY: Final = 0.5  # share of its time in which the bottleneck would compute if rows came alone

Seconds = Callable[[int, int], float]  # of a block with so many rows


@dataclass(frozen=True, slots=True)
class Speculation:
    """A surrogate `speedup` times as fast as the bottleneck, and the share of its predictions that hold."""

    speedup: float = SPEEDUP
    right: float = RIGHT


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """Seconds for an answer, and answers' tokens a second."""

    p50: float
    p95: float
    rate: float


class Chain:
    """Plays answers on blocks of given seconds, between which a row takes `sent` seconds."""

    def __init__(self, seconds: Seconds, sent: float, speculation: Speculation | None, seed: int = 0) -> None:
        self._seconds, self._sent = seconds, sent
        self._speculation, self._draw = speculation, random.Random(seed)
        self._lines: list[list[Callable[[], None]]] = [[] for _ in BLOCKS]  # what follows a row's computing
        self._busy = [False] * len(BLOCKS)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = 0.0
        self._ends: dict[int, float] = {}

    def play(self, arrivals: Sequence[float], tokens: int = ANSWER) -> ChainFigures:
        """Answers of `tokens` tokens to requests that come at these times."""
        for answer, at in enumerate(arrivals):
            self._at(at, partial(self._come, 0, answer, tokens))
        while self._events:
            self._now, _, happens = heappop(self._events)
            happens()
        latencies = [self._ends[answer] - at for answer, at in enumerate(arrivals)]
        rate = len(arrivals) * tokens / (max(self._ends.values()) - arrivals[0])
        return ChainFigures(percentile(latencies, 0.5), percentile(latencies, 0.95), rate)

    def _come(self, block: int, answer: int, left: int) -> None:
        """A row comes to a block, with `left` tokens of its answer to make."""
        if block == BOTTLENECK and self._speculation is not None:
            prediction = RowsAhead()
            quick = self._seconds(block, 1) / self._speculation.speedup  # in a stream of its own
            self._at(self._now + quick + self._sent, partial(self._go_ahead, prediction, answer, left))
            self._compute(block, partial(self._verify, prediction, answer, left))
        else:
            self._compute(block, partial(self._leave, block, answer, left))

    def _leave(self, block: int, answer: int, left: int) -> None:
        """A row has passed a block."""
        if block + 1 < len(BLOCKS):
            self._at(self._now + self._sent, partial(self._come, block + 1, answer, left))
        elif left > 1:
            self._at(self._now + self._sent, partial(self._come, 0, answer, left - 1))
        else:
            self._ends[answer] = self._now

    def _go_ahead(self, prediction: RowsAhead, answer: int, left: int) -> None:
        """A predicted row comes to the block behind the bottleneck."""
        if prediction.came():
            self._compute(BOTTLENECK + 1, partial(self._went_ahead, prediction, answer, left))

    def _went_ahead(self, prediction: RowsAhead, answer: int, left: int) -> None:
        self._go_on(prediction.computed(), answer, left)

    def _verify(self, prediction: RowsAhead, answer: int, left: int) -> None:
        """The bottleneck has computed what was predicted."""
        assert self._speculation is not None, "there is a prediction"
        cosine = 1.0 if self._draw.random() < self._speculation.right else 0.0
        self._go_on(prediction.verified(cosine), answer, left)

    def _go_on(self, step: SpeculationStep, answer: int, left: int) -> None:
        if step is SpeculationStep.PASS_ON:
            self._leave(BOTTLENECK + 1, answer, left)
        elif step is SpeculationStep.COMPUTE_AGAIN:
            self._leave(BOTTLENECK, answer, left)

    def _compute(self, block: int, then: Callable[[], None]) -> None:
        self._lines[block].append(then)
        self._serve(block)

    def _serve(self, block: int) -> None:
        """An idle block computes all rows that wait for it."""
        if not self._busy[block] and self._lines[block]:
            rows, self._lines[block] = self._lines[block], []
            self._busy[block] = True
            self._at(self._now + self._seconds(block, len(rows)), partial(self._computed, block, rows))

    def _computed(self, block: int, rows: list[Callable[[], None]]) -> None:
        self._busy[block] = False
        for then in rows:
            then()
        self._serve(block)

    def _at(self, then: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (then, next(self._numbers), happens))


def block_seconds(shape: ModelShape, table: Roofline) -> Seconds:
    """Seconds of a block of the shape's layers for decode rows, by the table."""
    edges = [0, *accumulate(BLOCKS)]
    counters = [PlanCounter(shape, span=Span(first, last)) for first, last in pairwise(edges)]

    @cache
    def seconds(block: int, rows: int) -> float:
        segments = tuple(InferenceSegment(n, _CONTEXT, 1, _CONTEXT, 1) for n in range(rows))
        return table.seconds(counters[block].count(BasePlan(inference=segments)), shape.dtype)

    return seconds


def run(shape: ModelShape, table: Roofline, quick: bool, say: Say) -> tuple[FigureTable, list[Statement]]:
    """The chain without speculation, with theirs, and with their ideal one, at one load."""
    seconds = block_seconds(shape, table)
    sent = _MESSAGE + shape.hidden * shape.item_bytes / _LINK
    rate = _BUSY / seconds(BOTTLENECK, 1) / ANSWER
    arrivals = poisson_times(rate, 4.0 if quick else 60.0, 1)
    kinds = {"none": None, "surrogates": Speculation(), "ideal": Speculation(IDEAL, 1.0)}
    found = {}
    for name, speculation in kinds.items():
        say(f"BlockLLM: speculation, {name}, {rate:.3g} requests/s")
        found[name] = Chain(seconds, sent, speculation).play(arrivals)
    caption = (
        f"Speculation: {len(BLOCKS)} blocks of {shape.name} on as many devices, {rate:.3g} requests/s of "
        f"{ANSWER} tokens; seconds for an answer"
    )
    rows = [(name, f"{one.p50:.3g}", f"{one.p95:.3g}", f"{one.rate:,.0f}") for name, one in found.items()]
    columns = ("speculation", "median", "95th percentile", "tokens/s")
    return FigureTable(caption, columns, tuple(rows)), [*_statements(*found.values())]


def _statements(none: ChainFigures, ours: ChainFigures, ideal: ChainFigures) -> Iterator[Statement]:
    lines = (
        "one chain here, whose bottleneck is a quarter of its layers; theirs shared devices with twenty "
        "applications, and what speculation saves there are lines, too"
    )
    unit = " times"
    about = "without speculation: median over that with surrogates (7.3)"
    yield size(about, 1.113, none.p50 / ours.p50, lines, unit, 1.0)
    about = "without speculation: 95th percentile over that with surrogates (7.3)"
    yield size(about, 1.316, none.p95 / ours.p95, lines, unit, 1.0)
    about = "ideal surrogates: 95th percentile over that of theirs (7.3)"
    yield size(about, 0.873, ideal.p95 / ours.p95, lines, unit, 1.0)
    same = "requests come at a rate here that either answers, theirs as quickly as they were answered"
    about = "ideal surrogates: throughput over that of theirs (7.3)"
    yield size(about, 1.128, ideal.rate / ours.rate, same, unit)
