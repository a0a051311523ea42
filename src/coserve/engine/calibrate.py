"""Measures the seconds of steps on this machine by running synthetic ones.

Other load makes a step slower, never quicker. So a step's cost is known once its two quickest runs took about
as long, and steps are run again until then, or until the time for it is over. What is not certain then is
rough: it is not kept for the next start, and real steps refine it (`CostModel.observe`).

On a GPU steps are larger: few rows pass while weights are read, and tell nothing of what a row costs. Steps
that graphs may have run until these are captured, and kernels are compiled, before the first answer waits.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from statistics import median
from typing import TypeVar

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.plan import BasePlan, BaseResult, OptimStep, TrainingSegment
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import MicroBatch, Sequence
from coserve.executors.executor import (
    CloseSession,
    DropAdapters,
    Executor,
    OpenSession,
    SkipReads,
)
from coserve.model.base import Base
from coserve.schedule.features import Features
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.fresh import sketch_adapter
from coserve.train.job import PreparedJob
from coserve.train.supervised import SupervisedSteps
from coserve.worker.training_graphs import WORTH

Sample = tuple[Features, float]
_Rows = tuple[int, int, int, int]  # decoding sequences, cached tokens of each, prompts, tokens of each
T = TypeVar("T")

_JOB = "calibration"
_SECONDS = 5.0  # for all rounds; each kind of step runs once in any case
_ALIKE = 1.25  # ratio of a step's two quickest runs from which on other load is the reason
_CERTAIN = 0.8  # share of the steps whose runs are alike
_ROUNDS = 6  # at most: on a machine that stays busy more of them tell nothing new
_LEAN_ROWS = 128  # of a window where memory is short
_GRAPH = 9  # steps of a kind after which it has its graph, if it can have one (`worker.cuda_graphs`)
_DECODED = 3  # decode steps without a window
_STEPS = 48  # of these sequences, at most, beside one window
_KEYS = count(-1, -1)  # negative, unlike a scheduler's


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Steps of a kind of device: `inference` in groups of rows, those that are `adapted` with an adapter,
    `windows` of (examples, tokens of each; few long ones attend more), and `beside` each other (sequences,
    cached tokens of each; rows of the window)."""

    inference: tuple[tuple[_Rows, ...], ...]
    adapted: tuple[tuple[_Rows, ...], ...]
    windows: tuple[tuple[int, int], ...]
    beside: tuple[int, int, int]


_SIZES = _Sizes(
    (
        ((1, 32, 0, 0), (4, 256, 0, 0), (16, 64, 0, 0), (16, 256, 0, 0)),
        ((0, 0, 1, 32), (0, 0, 1, 128), (0, 0, 1, 256), (0, 0, 8, 32)),
        ((1, 64, 1, 32), (4, 64, 1, 128)),
    ),
    (((4, 64, 0, 0), (16, 64, 0, 0)), ((0, 0, 1, 32), (0, 0, 1, 128))),
    ((1, 32), (1, 128), (1, 256), (8, 32)),
    (4, 64, 256),
)
_GPU_SIZES = _Sizes(
    (
        ((1, 64, 0, 0), (8, 448, 0, 0), (32, 448, 0, 0), (128, 64, 0, 0), (128, 448, 0, 0)),
        ((0, 0, 1, 64), (0, 0, 1, 512), (0, 0, 1, 2048), (0, 0, 4, 512), (0, 0, 8, 32)),
        ((1, 64, 1, 32), (32, 448, 1, 512)),
    ),
    (((8, 448, 0, 0), (32, 448, 0, 0)), ((0, 0, 1, 64), (0, 0, 1, 512))),
    ((1, 32), (1, 256), (1, 512), (4, 512), (1, 2048)),
    (32, 256, 2048),
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Steps with their quickest seconds, and whether these are certain: other load did not lengthen them."""

    samples: list[Sample]
    is_certain: bool


def measure(
    executor: Executor,
    base: Base,
    page_size: int,
    pages: int,
    lean: bool = False,
    seconds: float = _SECONDS,
) -> Calibration:
    """Costs of decode, prefill and, where the base has sites for adapters, training and mixed steps, which
    leave no state behind.

    Two rounds of some forty steps on an idle machine: half a second on a small model, five on 255M parameters
    and two cores. No further round begins that would end after `seconds`, and of a model whose first one
    takes longer only the smallest steps are run. Graphs are captured before. Weights of a streamed base are
    not read, nor the time for it counted. Where memory is short (`lean`) windows are small and adapters of
    rank 1. Must run while the engine has no requests and keeps no prefixes: it writes into arbitrary pages.
    """
    probe = _Probe(executor, base, page_size, lean)
    limits = pages * page_size, base.max_positions - 2
    runs: dict[tuple[float, ...], list[Sample]] = {}
    with _without_reads(executor):
        if executor.spec.graphs:
            _capture(probe, *limits)
        began = time.monotonic()
        probe.ends = began + seconds
        for rounds in range(1, _ROUNDS + 1):
            for sample in chain(_inference(probe, *limits, probe.sizes.inference), _training(probe, *limits)):
                runs.setdefault(tuple(sample[0].counted().values()), []).append(sample)
            is_certain = certain([sorted(taken for _, taken in same) for same in runs.values()])
            if is_certain or (time.monotonic() - began) * (rounds + 1) > seconds * rounds:
                break
    return Calibration([min(same, key=lambda sample: sample[1]) for same in runs.values()], is_certain)


def certain(runs: list[list[float]]) -> bool:
    """Tells whether the two quickest runs of most steps took about as long; `runs` are the seconds of each
    step, the quickest first."""
    alike = sum(len(same) > 1 and same[1] <= _ALIKE * same[0] for same in runs)
    return alike >= _CERTAIN * len(runs)


def measure_interference(
    executor: Executor, base: Base, page_size: int, pages: int
) -> tuple[float, float] | None:
    """Measures slowdown factors (decode, training) beside each other, each on half of the machine, relative
    to the whole machine alone. Takes two seconds on 255M parameters; see `measure`.

    None where pages are too few, or the executor runs both one after the other.
    """
    probe, positions = _Probe(executor, base, page_size), base.max_positions
    batch, context, rows = probe.sizes.beside
    rows = min(rows, base.row_buckets.whole_rows(positions - 2))
    if batch * -(-(context + _STEPS) // page_size) > pages or context + _STEPS > positions:
        return None
    if batch > executor.spec.sequences or base.depth < 2:
        return None
    answering, training = [], []
    with _micro_batch(probe, 1, rows) as micro_batch:
        while not micro_batch.done:  # a half of the layers alone, the other beside answers
            with _next_half(micro_batch, rows) as window:
                alone = probe.timed(BasePlan(training=(window,)))[1]
            if micro_batch.is_paused:
                with _next_half(micro_batch, rows) as window:
                    steps, seconds = _beside(probe, window)
                answering += steps
                training.append(seconds / alone)
    with _decoding(probe) as decode:
        alone = median(probe.timed(step)[1] for step in islice(decode, _DECODED))
    return (median(answering) / alone, median(training)) if all(answering) else None


@contextmanager
def _without_reads(executor: Executor) -> Iterator[None]:
    executor.call(SkipReads(True))
    try:
        yield
    finally:
        executor.call(SkipReads(False))


class _Probe:
    """Runs one-off plans and times them."""

    def __init__(
        self,
        executor: Executor,
        base: Base,
        page_size: int,
        lean: bool = False,
        ends: float = float("inf"),
    ) -> None:
        self.executor, self.base, self.page_size, self.lean = executor, base, page_size, lean
        self.ends = ends
        self.sizes = _GPU_SIZES if base.device.type == "cuda" else _SIZES

    def some(self, sizes: tuple[T, ...]) -> Iterator[T]:
        """The sizes of steps, the smallest first, until the time is over; always the first."""
        yield from (size for size in sizes if size == sizes[0] or time.monotonic() < self.ends)

    def run(self, plan: BasePlan) -> BaseResult:
        return self.executor.run(replace(plan, pauses=sys.maxsize))  # made after all that there were

    def timed(self, plan: BasePlan) -> Sample:
        features, result = Features.of(plan), self.run(plan)
        return (
            features.launched if result.launched.answers else features,
            result.seconds - result.reads.waited,
        )

    def sequence(
        self, tokens: int, answered: int, first_page: int, room: int = 1, adapter: str | None = None
    ) -> Sequence:
        """A sequence whose first tokens count as computed; pages from `first_page` on, for `room` more."""
        request = Request("calibration", (0,) * (tokens - answered), SamplingParams(seed=0), adapter)
        sequence = Sequence(next(_KEYS), request, output=[0] * answered)
        needed = -(-(tokens + room) // self.page_size)
        sequence.pages = list(range(first_page, first_page + needed))
        return sequence


@contextmanager
def _next_half(micro_batch: MicroBatch, rows: int) -> Iterator[TrainingSegment]:
    """The next segment of a micro-batch: half of the layers, or the tail; counted as done on exit."""
    span = micro_batch.next_span(micro_batch.layers // 2)
    yield training_segment(micro_batch, 0, rows, micro_batch.direction, span)
    micro_batch.advance(0, rows, span)


def _beside(probe: _Probe, window: TrainingSegment) -> tuple[list[float], float]:
    """Seconds of each decode step beside a window, and of the window; zeros where no step ran beside it."""
    with _decoding(probe) as steps:
        result = probe.run(replace(next(steps), training=(window,), share=0.5))
        answering = [result.stream_seconds[0]]
        while not result.trained:
            step = next(steps, BasePlan())
            result = probe.run(replace(step, share=0.5))
            answering += [result.stream_seconds[0]] if step.inference else []
    return answering, result.stream_seconds[1]


@contextmanager
def _decoding(probe: _Probe) -> Iterator[Iterator[BasePlan]]:
    """Decode steps of the sequences beside a window, `_STEPS` of them."""
    batch, context, _ = probe.sizes.beside
    needed = -(-(context + _STEPS) // probe.page_size)
    answers = [probe.sequence(context, 1, i * needed, room=_STEPS) for i in range(batch)]
    yield (_next_tokens(answers) for _ in range(_STEPS))
    probe.run(BasePlan(released=tuple(answer.key for answer in answers)))


def _next_tokens(answers: list[Sequence]) -> BasePlan:
    """One decode row of each, counted as answered."""
    plan = inference_plan((answer, answer.length - 1, 1) for answer in answers)
    for answer in answers:
        answer.output.append(0)
    return plan


def _inference(
    probe: _Probe, room: int, positions: int, steps: tuple[tuple[_Rows, ...], ...], adapter: str | None = None
) -> Iterator[Sample]:
    for decoding, context, prompts, tokens in chain.from_iterable(map(probe.some, steps)):
        pages = -(-(max(context, tokens) + 1) // probe.page_size)
        batch = decoding + prompts
        if max(context, tokens) > positions or batch * pages * probe.page_size > room:
            continue
        if batch > probe.executor.spec.sequences:
            continue
        sizes = [(context, 1)] * decoding + [(tokens, 0)] * prompts
        asked = [probe.sequence(*size, i * pages, adapter=adapter) for i, size in enumerate(sizes)]
        rows = [(one, one.length - 1, 1) if one.output else (one, 0, tokens) for one in asked]
        yield probe.timed(inference_plan(rows))
        probe.run(BasePlan(released=tuple(answer.key for answer, _, _ in rows)))


def _capture(probe: _Probe, room: int, positions: int) -> None:
    """Has the device capture the graphs of all steps of inference, and of windows alone."""
    for _ in range(_GRAPH):
        deque(_inference(probe, room, positions, probe.sizes.inference), maxlen=0)
    if probe.base.sites:
        with _micro_batch(probe, *probe.sizes.windows[0]) as micro_batch:
            for _ in range(_GRAPH):
                deque(_inference(probe, room, positions, probe.sizes.adapted, micro_batch.adapter), maxlen=0)
    for batch, rows in _windows(probe, room, positions):
        for _ in range(WORTH):
            with _micro_batch(probe, batch, rows) as micro_batch:
                deque(
                    _there_and_back(probe, micro_batch, batch * rows, probe.base.depth, BasePlan()), maxlen=0
                )


def _windows(probe: _Probe, room: int, positions: int) -> Iterator[tuple[int, int]]:
    """The windows (examples, tokens of each) that there is room for; a chain of two bases trains nothing."""
    for batch, rows in probe.some(probe.sizes.windows) if probe.base.sites else ():
        if rows <= min(room, positions) and not (probe.lean and batch * rows > _LEAN_ROWS):
            yield batch, rows


def _training(probe: _Probe, room: int, positions: int) -> Iterator[Sample]:
    half = max(1, probe.base.depth // 2)
    for batch, rows in _windows(probe, room, positions):
        with _micro_batch(probe, batch, rows) as micro_batch:
            if (batch, rows) == probe.sizes.windows[0]:
                yield from _inference(probe, room, positions, probe.sizes.adapted, micro_batch.adapter)
            answer = probe.sequence(64, 1, 0)
            # Where windows have graphs one that shares a pass is launched, which a large one would hide.
            is_shared = not probe.executor.spec.graphs or (batch, rows) == probe.sizes.windows[0]
            beside = inference_plan([(answer, 63, 1)] if is_shared else [])
            yield from _there_and_back(probe, micro_batch, batch * rows, half, beside)
            probe.run(BasePlan(released=(answer.key,)))
            yield probe.timed(BasePlan(updates=(OptimStep(_JOB, learning_rate=1e-30),)))


@contextmanager
def _micro_batch(probe: _Probe, batch: int, rows: int) -> Iterator[MicroBatch]:
    """The only micro-batch of a job's only step: `batch` examples of `rows` tokens."""
    executor = probe.executor
    examples = (Example(tokens=(0,) * rows, labels=(0,) * rows),) * batch
    training, method = TrainingConfig(batch_size=batch), LoRAConfig(rank=1) if probe.lean else LoRAConfig()
    first = sketch_adapter(probe.base, _JOB, method, training.seed)
    job = PreparedJob(_JOB, _JOB, Prepared(examples), (method,), training, first, is_fresh=True)
    steps = SupervisedSteps(job, probe.base)
    executor.call(OpenSession.of(job, 0, steps.session))
    (micro_batch,) = steps.next_step(_KEYS)
    probe.run(BasePlan(micro_batches=announce_batches([micro_batch])))
    yield micro_batch
    executor.call(CloseSession(_JOB))
    executor.call(DropAdapters((f"{_JOB}@0", f"{_JOB}@1")))


def _there_and_back(
    probe: _Probe, micro_batch: MicroBatch, rows: int, half: int, inference: BasePlan
) -> Iterator[Sample]:
    """One window forward in spans of at most so many layers, and the rest, the first one beside `inference`;
    then the tail, and the way back alike."""
    depth = probe.base.depth
    while not micro_batch.done:
        span = micro_batch.next_span(depth if micro_batch.is_paused else half)
        window = training_segment(micro_batch, 0, rows, micro_batch.direction, span)
        yield probe.timed(replace(inference, training=(window,)))
        micro_batch.advance(0, rows, span)
        inference = BasePlan()
