"""Records the training of a run's plans, so that it can be replayed exactly.

A test replays the windows and spans of a co-serving run against whole-sequence autograd.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coserve.core.plan import BasePlan, StepPlan, StepResult
from coserve.core.sequence import Direction, Span
from coserve.engine.engine import Engine
from coserve.executors.local import LocalExecutor
from coserve.train.session import TrainingSession
from coserve.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """Rows [start, start + length) of the micro-batch `key`, one way through the layers of `span`.
    `lengths` are the rows of the examples that the micro-batch packs."""

    job: str
    key: int
    lengths: tuple[int, ...]
    start: int
    length: int
    direction: Direction
    span: Span


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One plan that trained: `inference` rows beside its segments, and the jobs whose optimizer stepped."""

    inference: int
    training: tuple[RecordedSegment, ...]
    updates: tuple[str, ...]


@contextmanager
def watch_plans(engine: Engine, look: Callable[[BasePlan], None]) -> Iterator[None]:
    """Calls `look` with every plan the engine has run, before the schedule takes its result in."""
    executor, before = engine.loop.executor, engine.scheduler.under_way  # plans that it does not know
    outer = {name: vars(executor).get(name) for name in ("launch", "collect")}
    launch, collect, launched = executor.launch, executor.collect, deque[StepPlan | None]([None] * before)

    def launching(plan: StepPlan) -> None:
        launched.append(plan)
        launch(plan)

    def collecting(wait: bool = True) -> StepResult | None:
        result = collect(wait)
        if result is not None and (plan := launched.popleft()) is not None:
            look(plan.only)
        return result

    vars(executor).update(launch=launching, collect=collecting)
    try:
        yield
    finally:
        for name, watching in outer.items():
            del vars(executor)[name]  # the class's own is found again
            if watching is not None:  # somebody else watches, too
                vars(executor)[name] = watching


def local_sessions(engine: Engine) -> Mapping[str, TrainingSession]:
    """Training sessions of an engine whose executor is in this process, by job."""
    assert isinstance(engine.executor, LocalExecutor), "what a session holds is looked at here"
    sessions: Mapping[str, TrainingSession] = engine.executor.worker.sessions
    return sessions


def local_worker(engine: Engine) -> Worker:
    """The worker of an engine whose executor is in this process."""
    assert isinstance(engine.executor, LocalExecutor), "how a worker computes is changed here"
    worker = engine.executor.worker
    assert isinstance(worker, Worker)
    return worker


@contextmanager
def record_plans(engine: Engine) -> Iterator[list[RecordedStep]]:
    """Fills the list it gives with the training steps that the engine runs in here."""
    steps: list[RecordedStep] = []

    lengths: dict[int, tuple[int, ...]] = {}

    def look(plan: BasePlan) -> None:
        lengths.update({start.key: start.lengths for start in plan.micro_batches})
        if plan.training or plan.updates:
            steps.append(_recorded(plan, lengths))

    with watch_plans(engine, look):
        yield steps


def whole_journeys(steps: list[RecordedStep]) -> dict[int, list[RecordedSegment]]:
    """Segments of each micro-batch that passed forward and backward within the steps, in order."""
    by_key: dict[int, list[RecordedSegment]] = {}
    for step in steps:
        for segment in step.training:
            by_key.setdefault(segment.key, []).append(segment)
    return {key: segments for key, segments in by_key.items() if _is_whole(segments)}


def save_plans(steps: list[RecordedStep], path: str | Path) -> None:
    """Writes steps as JSON: one line a step, micro-batches described once."""
    batches = {s.key: [s.job, s.lengths] for step in steps for s in step.training}
    lines = [json.dumps(_compact(step), separators=(",", ":")) for step in steps]
    head = json.dumps({str(key): value for key, value in batches.items()}, separators=(",", ":"))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text('{"micro_batches":' + head + ',\n"steps":[\n' + ",\n".join(lines) + "\n]}\n")


def load_plans(path: str | Path) -> list[RecordedStep]:
    """The steps that `save_plans` wrote."""
    data = json.loads(Path(path).read_text())
    batches = {int(key): (job, tuple(lengths)) for key, (job, lengths) in data["micro_batches"].items()}
    steps = []
    for inference, training, updates in data["steps"]:
        segments = tuple(
            RecordedSegment(*_described(batches, key), start, length, Direction(direction), Span(first, last))
            for key, start, length, direction, first, last in training
        )
        steps.append(RecordedStep(inference, segments, tuple(updates)))
    return steps


def _described(batches: dict[int, tuple[str, tuple[int, ...]]], key: int) -> tuple[str, int, tuple[int, ...]]:
    job, lengths = batches[key]
    return job, key, lengths


def _compact(step: RecordedStep) -> list[object]:
    segments = [
        [s.key, s.start, s.length, s.direction.value, s.span.first, s.span.last] for s in step.training
    ]
    return [step.inference, segments, step.updates]


def _recorded(plan: BasePlan, lengths: Mapping[int, tuple[int, ...]]) -> RecordedStep:
    training = tuple(
        RecordedSegment(s.job, s.key, lengths[s.key], s.start, s.length, s.direction, s.span)
        for s in plan.training
        if s.key in lengths  # else it set out before the recording began
    )
    updates = tuple(update.job for update in plan.updates)
    return RecordedStep(sum(s.length for s in plan.inference), training, updates)


def _is_whole(segments: list[RecordedSegment]) -> bool:
    """Tells whether segments start forward at the first layer of the first row, and end backward there."""
    first, last = segments[0], segments[-1]
    begins = (first.direction, first.start, first.span.first) == (Direction.TRAIN_FORWARD, 0, 0)
    return begins and (last.direction, last.start, last.span.first) == (Direction.BACKWARD, 0, 0)
