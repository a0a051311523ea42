"""A step's training: windows in slices forward, through the tail and back, and optimizer steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from coserve.core.plan import MicroBatchOutput, OptimStep, TrainingSegment, Updated
from coserve.core.sequence import Direction
from coserve.errors import CoserveError, JobError, TogetherFailed
from coserve.memory.exhausted import together
from coserve.train.backward import BackwardWindow, JobWindow, backward_layers
from coserve.train.micro_batch import MicroBatchState
from coserve.train.pause import TrainingPause
from coserve.train.session import TrainingSession
from coserve.train.shortage import Shortages
from coserve.train.updating import update_all
from coserve.train.window import Window
from coserve.train.window_group import ForwardWindow
from coserve.worker.held import HeldState
from coserve.worker.slices import (
    BackwardSlices,
    ForwardSlices,
    Sliced,
    SlicesUnderWay,
    TailSlice,
    W,
    run_slices,
)
from coserve.worker.training_graphs import Forward, TrainingGraphs


class TrainingPasses:
    """Runs windows of a device's sessions in slices, and takes optimizer steps.

    `short` are the jobs whose rows have failed since they were last asked for, `pause` stops the step's
    training between two slices. `graphs` take windows whose kernels they hold.
    """

    def __init__(self, held: HeldState) -> None:
        self.sessions, self._held = held.sessions, held
        self.short = Shortages(held.drop_activations)
        ranks = held.base.shards.every
        self.pause = TrainingPause(None if ranks.count == 1 else ranks.decides)
        self.graphs: TrainingGraphs | None = None
        self._under_way = SlicesUnderWay(held.base.device)
        self._launched: set[str] = set()  # jobs whose windows have gone back without a graph

    def run(
        self,
        segments: Sequence[TrainingSegment],
        layers: int,
        forward: Forward,
        alone: bool,
        captures: bool = False,
    ) -> list[TrainingSegment]:
        """Runs segments in slices of so many layers: windows forward (which `forward` takes through layers),
        then through the tail, then back, those at one layer together or each `alone`. Returns them with the
        layers passed before a pause. Where it `captures`, no answers wait, and graphs may be made."""
        if self.graphs is not None:
            self.graphs.may_capture = captures
            forward = partial(self._forward, forward)
        self.pause.went_on()
        if self.pause.is_due:
            return []
        done = run_slices(self._ways(segments, forward, alone), layers, self.pause, self._under_way)
        for segment in done:
            is_last = segment.direction is Direction.BACKWARD and segment.start == segment.span.first == 0
            if is_last and segment.job not in self.short:
                with self.short.of(segment.job):
                    self.sessions[segment.job].micro_batches[segment.key].finish()
        return self.done(segments, done)

    def done(
        self, segments: Iterable[TrainingSegment], passed: Iterable[TrainingSegment]
    ) -> list[TrainingSegment]:
        """The part of segments that is done: of those that have `passed` layers these, and all of a failed
        job, as nothing of it is left to do."""
        failed = [segment for segment in segments if segment.job in self.short]
        return [segment for segment in passed if segment.job not in self.short] + failed

    def update(self, updates: Sequence[OptimStep]) -> tuple[dict[str, Updated], dict[str, CoserveError]]:
        updated: dict[str, Updated] = {}
        failed: dict[str, CoserveError] = {}
        if not updates:
            return updated, failed
        short = Shortages(self._held.drop_activations)
        due: list[tuple[TrainingSession, OptimStep]] = []
        for update in updates:
            with short.of(update.job):
                session = self.sessions[update.job]
                session.weights.make_room()
                due.append((session, update))
        outcomes: list[Updated | JobError] = []
        with suppress(TogetherFailed), together("optimizer steps of several jobs"):
            outcomes += update_all(due)
        if not outcomes:  # and nothing has changed
            for one in due:
                with short.of(one[0].job):
                    outcomes += update_all([one])
        due = [one for one in due if one[0].job not in short]
        for (session, _), found in zip(due, outcomes, strict=True):
            if isinstance(found, JobError):
                failed[session.job] = found
            else:
                updated[session.job] = found
        return updated, failed | short.take()

    def outputs(self, trained: Sequence[TrainingSegment]) -> dict[int, MicroBatchOutput]:
        """Outputs of the micro-batches that report and have ended with these segments."""
        found: dict[int, MicroBatchOutput] = {}
        for segment in trained:
            if segment.job in self.short or (session := self.sessions.get(segment.job)) is None:
                continue
            micro_batch = session.micro_batches.get(segment.key)
            if micro_batch is not None and micro_batch.start.reports and micro_batch.loss is not None:
                with self.short.of(segment.job):
                    found[segment.key] = session.take_output(segment.key)
        return found

    def backward(
        self,
        layers: range,
        windows: Sequence[JobWindow],
        rows: int,
        short: Shortages,
        check: Callable[[], object],
    ) -> None:
        """Takes windows back through layers: those that graphs hold one by one, and others in groups
        (`train.backward.backward_layers`)."""
        if left := [one for one in windows if not self._goes_back_by_graph(*one, layers, short)]:
            backward_layers(layers, left, rows, short, check)

    def _goes_back_by_graph(self, job: str, window: BackwardWindow, layers: range, short: Shortages) -> bool:
        """Takes a window back by graph; tells whether nothing is left of it to do."""
        if self.graphs is None or job in short:
            return False
        is_replayed = True  # as nothing is left of a job that fails
        with short.of(job):
            is_replayed = self.graphs.backward(window, layers)
        if not is_replayed:
            self._launched.add(job)
        return is_replayed

    def take_launched(self) -> frozenset[str]:
        """Returns, once, the jobs whose windows went back without a graph that a device with graphs has for
        others."""
        found, self._launched = frozenset(self._launched), set()
        return found

    def _forward(self, forward: Forward, windows: Sequence[ForwardWindow], layers: range) -> None:
        """Takes windows forward: those that graphs hold one by one, and others together."""
        assert self.graphs is not None
        if left := [window for window in windows if not self.graphs.forward(window, layers)]:
            forward(left, layers)

    def forward_slices(self, segments: Sequence[TrainingSegment], forward: Forward) -> ForwardSlices:
        """Windows that go forward together."""
        return ForwardSlices(self._windows(segments, _forward_window), self.short, forward)

    def _ways(self, segments: Sequence[TrainingSegment], forward: Forward, alone: bool) -> Iterator[Sliced]:
        there = [segment for segment in segments if segment.direction is Direction.TRAIN_FORWARD]
        for group in [[segment] for segment in there] if alone else [there]:
            if group:
                yield self.forward_slices(group, forward)
        for segment in segments:
            if segment.direction.is_tail:
                yield TailSlice(segment, self._through_tail, self.short)
        if back := [segment for segment in segments if segment.direction is Direction.BACKWARD]:
            windows, rows = self._windows(back, _backward_window), self._held.window_group_rows
            yield BackwardSlices(windows, self.short, 0 if alone else rows, self.pause.check, self.backward)

    def _windows(
        self,
        segments: Sequence[TrainingSegment],
        make: Callable[[TrainingSegment, MicroBatchState, Window], W],
    ) -> dict[TrainingSegment, W]:
        """Windows on their way, those of sessions with the same `batch_key` side by side."""
        found: dict[TrainingSegment, W] = {}
        for segment in sorted(segments, key=lambda segment: self.sessions[segment.job].batch_key):
            if segment.job not in self.short:
                with self.short.of(segment.job):
                    found[segment] = make(segment, *self._window(segment))
        return found

    def _window(self, segment: TrainingSegment) -> tuple[MicroBatchState, Window]:
        micro_batch = self.sessions[segment.job].micro_batches[segment.key]
        return micro_batch, micro_batch.store.window(segment.start, segment.length)

    def _through_tail(self, segment: TrainingSegment) -> None:
        micro_batch, window = self._window(segment)
        tail, bypasses = micro_batch.tail, micro_batch.bypasses(window)
        (tail.logprobs if segment.direction is Direction.LOGPROBS else tail.loss)(window, bypasses)
        if micro_batch.start.forward_only and window.span.stop == micro_batch.store.rows:
            micro_batch.finish()


def _forward_window(segment: TrainingSegment, micro_batch: MicroBatchState, window: Window) -> ForwardWindow:
    layers, calls = range(segment.span.first, segment.span.last), micro_batch.store.calls_for(window)
    return ForwardWindow(layers, micro_batch.store, window, micro_batch.bypasses(window), calls)


def _backward_window(
    segment: TrainingSegment, micro_batch: MicroBatchState, window: Window
) -> BackwardWindow:
    return micro_batch.backward.start(window, segment.span, micro_batch.bypasses(window))
