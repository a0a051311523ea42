"""Slices of training: windows through some layers in one direction, the unit in which training yields.

A plan says how many layers a slice has (`BasePlan.slice_layers`). Between two slices its training may be
paused, and those that have not begun come back. Nothing within a slice asks whether it should go on, except
where an arrival has the layer under way abandoned (`train.pause`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from coserve.core.plan import TrainingSegment
from coserve.errors import TogetherFailed
from coserve.memory.exhausted import is_out_of_memory, words_of
from coserve.train.backward import BackwardWindow, backward_layers
from coserve.train.pause import TrainingPause
from coserve.train.shortage import Shortages
from coserve.train.window_group import ForwardWindow

Slice = Callable[[], object]


class Sliced(Protocol):
    """Segments that go one way together, slice by slice."""

    def slices(self, layers: int) -> Iterator[Slice]:
        """The slices in their order, of `layers` layers each; 0 makes one slice of all layers."""
        ...

    def end(self) -> list[TrainingSegment]:
        """Ends after the slices that have run; returns the segments with the layers that they have passed."""
        ...


def run_slices(ways: Iterator[Sliced], layers: int, pause: TrainingPause) -> list[TrainingSegment]:
    """Runs slices until a pause, or until one fails; returns the segments with the layers that they have
    passed."""
    done: list[TrainingSegment] = []
    for way in ways:
        is_through = all(not pause.is_due and pause.ran(run) for run in way.slices(layers))
        done += way.end()
        if not is_through or pause.is_due:  # what would go another way is not even looked up
            break
    return done


class ForwardSlices:
    """Windows that go forward, by segment: `forward` takes some of them through layers."""

    def __init__(
        self,
        windows: Mapping[TrainingSegment, ForwardWindow],
        forward: Callable[[Sequence[ForwardWindow], range], object],
        short: Shortages,
    ) -> None:
        self._windows, self._forward, self._short = windows, forward, short

    def slices(self, layers: int) -> Iterator[Slice]:
        """See `Sliced`."""
        return (partial(self._run, part) for part in self.parts(layers))

    def parts(self, layers: int) -> Iterator[range]:
        """The layers of each slice."""
        spans = [window.layers for window in self._windows.values()]
        whole = range(min((span.start for span in spans), default=0), max((s.stop for s in spans), default=0))
        return _cut(whole, layers)

    def end(self) -> list[TrainingSegment]:
        """See `Sliced`."""
        return _passed(self._windows)

    @property
    def going(self) -> list[ForwardWindow]:
        """Windows of jobs that have not failed."""
        return [window for segment, window in self._windows.items() if segment.job not in self._short]

    def _run(self, layers: range) -> None:
        """Takes all windows through layers. Raises TogetherFailed where memory does not last for several; a
        job whose only window it is fails."""
        if len(self._windows) > 1:
            self._run_together(layers)
            return
        for segment in self._windows:
            if segment.job not in self._short:
                with self._short.of(segment.job):
                    self._forward(self.going, layers)

    def _run_together(self, layers: range) -> None:
        try:
            self._forward(self.going, layers)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            words = words_of(error)
        else:
            return
        raise TogetherFailed(words)  # after the error, whose frames hold their tensors


class TailSlice:
    """One window at the tail, where `run` takes it."""

    def __init__(
        self, segment: TrainingSegment, run: Callable[[TrainingSegment], object], short: Shortages
    ) -> None:
        self._segment, self._pass, self._short = segment, run, short
        self._done: list[TrainingSegment] = []

    def slices(self, layers: int) -> Iterator[Slice]:
        """See `Sliced`."""
        yield self._run

    def end(self) -> list[TrainingSegment]:
        """See `Sliced`."""
        return self._done

    def _run(self) -> None:
        if self._segment.job not in self._short:
            with self._short.of(self._segment.job):
                self._pass(self._segment)
        self._done = [self._segment]


class BackwardSlices:
    """Windows that go back, by segment; windows of several jobs at one layer pass it in groups of at most
    `rows` rows."""

    def __init__(
        self,
        windows: Mapping[TrainingSegment, BackwardWindow],
        rows: int,
        short: Shortages,
        check: Callable[[], object],
    ) -> None:
        self._windows, self._rows, self._short, self._check = windows, rows, short, check

    def slices(self, layers: int) -> Iterator[Slice]:
        """See `Sliced`."""
        spans = [window.layers for window in self._windows.values() if window.layers]
        top, below = max((s.start for s in spans), default=0), min((s.stop for s in spans), default=0)
        whole = range(top, below, -1)
        return (partial(self._run, part) for part in _cut(whole, layers))

    def end(self) -> list[TrainingSegment]:
        """See `Sliced`. Leaves each window's gradient where its next layer finds it."""
        for segment, window in self._windows.items():
            if segment.job not in self._short:
                with self._short.of(segment.job):
                    window.backward.finish(window)
        return _passed(self._windows)

    def _run(self, layers: range) -> None:
        windows = [(segment.job, window) for segment, window in self._windows.items()]
        backward_layers(layers, windows, self._rows, self._short, self._check)


def _passed(windows: Mapping[TrainingSegment, ForwardWindow | BackwardWindow]) -> list[TrainingSegment]:
    """The segments of windows that have passed any layer, with those layers."""
    return [replace(segment, span=window.passed) for segment, window in windows.items() if window.passed]


def _cut(whole: range, layers: int) -> Iterator[range]:
    """Parts of so many layers of a range; 0 leaves it whole."""
    step = layers or max(len(whole), 1)
    return (whole[start : start + step] for start in range(0, len(whole), step))
