"""Training segments behind a step's forward pass: through the tail, back through layers, optimizer steps."""

from collections.abc import Sequence
from dataclasses import replace

from coserve.core.plan import Lane, MicroBatchOutput, OptimStep, TrainingSegment, Updated
from coserve.core.sequence import Direction
from coserve.errors import CoserveError, LossNotFinite, WeightsUnreadable
from coserve.train.backward import BackwardWindow, backward_windows
from coserve.train.micro_batch import MicroBatchState
from coserve.train.pause import TrainingPause
from coserve.train.session import TrainingSession
from coserve.train.shortage import Shortages
from coserve.train.updating import update_all
from coserve.train.window import Window
from coserve.worker.held import HeldState


class TrainingPasses:
    """Runs windows of a device's sessions through the tail and back, and takes optimizer steps.

    `short` are the jobs whose rows have failed since they were last asked for, `pause` stops the step's
    training between two layers.
    """

    def __init__(self, held: HeldState) -> None:
        self.sessions, self._held = held.sessions, held
        self.short = Shortages(held.drop_activations)
        self.pause = TrainingPause()

    def run(self, lane: Lane) -> list[TrainingSegment]:
        """Takes windows through the tail, then others back through layers; returns the segments that ran."""
        trained: list[TrainingSegment] = []
        self.pause.went_on()
        for segment in lane.training:
            if segment.direction.is_tail and not self.pause.is_due:
                try:
                    if (job := segment.job) not in self.short:
                        with self.short.of(job):
                            self._through_tail(segment)
                except WeightsUnreadable as error:
                    self.pause.failure = error
                    return trained
                self.pause.passed()
                trained.append(segment)
        if self.pause.is_due:
            return trained
        backward = [segment for segment in lane.training if segment.direction is Direction.BACKWARD]
        return trained + self._backward(backward)

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
        for (session, _), found in zip(due, update_all(due), strict=True):
            if isinstance(found, LossNotFinite):
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

    def window(self, segment: TrainingSegment) -> tuple[MicroBatchState, Window]:
        micro_batch = self.sessions[segment.job].micro_batches[segment.key]
        return micro_batch, micro_batch.store.window(segment.start, segment.length)

    def by_batch_key(self, segments: Sequence[TrainingSegment]) -> list[TrainingSegment]:
        """Sorts segments by their session's `batch_key`, stably."""
        return sorted(segments, key=lambda segment: self.sessions[segment.job].batch_key)

    def _through_tail(self, segment: TrainingSegment) -> None:
        micro_batch, window = self.window(segment)
        tail, bypasses = micro_batch.tail, micro_batch.bypasses(window)
        (tail.logprobs if segment.direction is Direction.LOGPROBS else tail.loss)(window, bypasses)
        if micro_batch.start.forward_only and window.span.stop == micro_batch.store.rows:
            micro_batch.finish()

    def _backward(self, segments: Sequence[TrainingSegment]) -> list[TrainingSegment]:
        """Takes windows back through layers; returns them with the layers they passed before a pause."""
        windows: list[tuple[TrainingSegment, BackwardWindow]] = []
        for segment in self.by_batch_key(segments):
            if (job := segment.job) not in self.short:
                with self.short.of(job):
                    micro_batch, window = self.window(segment)
                    bypasses = micro_batch.bypasses(window)
                    windows.append((segment, micro_batch.backward.start(window, segment.span, bypasses)))
        of_jobs = [(segment.job, window) for segment, window in windows]
        backward_windows(of_jobs, self._held.window_group_rows, self.short, self.pause)
        trained = [replace(segment, span=window.span) for segment, window in windows if len(window.span)]
        failed = [segment for segment in segments if segment.job in self.short]
        trained = [segment for segment in trained if segment.job not in self.short]
        for segment in trained:
            if segment.start == 0 and segment.span.first == 0:
                self.sessions[segment.job].micro_batches[segment.key].finish()
        return trained + failed
