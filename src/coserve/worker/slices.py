"""Slices of training: windows through some layers in one direction, the unit in which training yields.

A plan says how many layers a slice has (`BasePlan.slice_layers`). Between two slices its training may be
paused, and those that have not begun come back. Nothing within a slice asks whether it should go on, except
where an arrival has the layer under way abandoned (`train.pause`), and nothing repeats a slice: one that
fails ends the step's training, and the host plans what is left of it anew.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch

from coserve.core.plan import TrainingSegment
from coserve.core.step_trace import span
from coserve.memory.exhausted import together
from coserve.train.backward import BackwardWindow, JobWindow
from coserve.train.pause import TrainingPause
from coserve.train.shortage import Shortages
from coserve.train.window_group import ForwardWindow

Slice = Callable[[], object]
GoBack = Callable[[range, Sequence[JobWindow], int, Shortages, Callable[[], object]], None]
W = TypeVar("W", ForwardWindow, BackwardWindow)


_OUTSTANDING: Final = 2  # slices that a GPU has not done: one runs, and one is there when that ends


class SlicesUnderWay:
    """Slices that a GPU has been given, and has not done. The host waits before it gives it more than two: a
    pause would come too late for them. A processor has done a slice when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends = deque[Any]()  # events

    def add(self) -> None:
        """Counts the slice that the current stream was given last, and waits for older ones."""
        if self._device.type == "cuda":
            self._ends.append(torch.cuda.current_stream(self._device).record_event())
            while len(self._ends) > _OUTSTANDING:
                self._ends.popleft().synchronize()


class WindowSlices(ABC, Generic[W]):
    """Windows that go one way together, slice by slice, by segment."""

    def __init__(self, windows: Mapping[TrainingSegment, W], short: Shortages) -> None:
        self._windows: Mapping[TrainingSegment, W] = windows
        self._short = short

    def slices(self, layers: int) -> Iterator[Slice]:
        """The slices in their order."""
        return (partial(self._run, part) for part in self.parts(layers))

    def parts(self, layers: int) -> Iterator[range]:
        """The layers of each slice, so many of them; 0 makes one slice of all layers."""
        if spans := [window.layers for window in self._windows.values() if window.layers]:
            step = spans[0].step
            first, last = (min, max) if step > 0 else (max, min)
            whole = range(first(span.start for span in spans), last(span.stop for span in spans), step)
            most = layers or len(whole)
            yield from (whole[start : start + most] for start in range(0, len(whole), most))

    def end(self) -> list[TrainingSegment]:
        """Ends after the slices that have run; returns the segments with the layers that they have passed."""
        windows = self._windows.items()
        return [replace(segment, span=window.passed) for segment, window in windows if window.passed]

    @abstractmethod
    def _run(self, layers: range) -> None:
        """Takes the windows through layers."""


class ForwardSlices(WindowSlices[ForwardWindow]):
    """Windows that go forward: `forward` takes some of them through layers."""

    NAME: ClassVar[str] = "slice forward"

    def __init__(
        self,
        windows: Mapping[TrainingSegment, ForwardWindow],
        short: Shortages,
        forward: Callable[[Sequence[ForwardWindow], range], object],
    ) -> None:
        super().__init__(windows, short)
        self._forward = forward

    @property
    def going(self) -> list[ForwardWindow]:
        """Windows of jobs that have not failed."""
        return [window for segment, window in self._windows.items() if segment.job not in self._short]

    def _run(self, layers: range) -> None:
        """Raises TogetherFailed where memory does not last for several. Where they fail together for another
        reason each goes on alone from where it is, and fails if it is the cause."""
        if len(self._windows) > 1:
            with together("windows of several jobs") as failed:
                self._forward(self.going, layers)
            if not failed:
                return
        for segment, window in self._windows.items():
            if segment.job not in self._short:
                with self._short.of(segment.job):
                    self._forward([window], range(max(window.reached, layers.start), layers.stop))


class TailSlice:
    """One window at the tail, where `run` takes it in one slice."""

    NAME: ClassVar[str] = "slice of the tail"

    def __init__(
        self, segment: TrainingSegment, run: Callable[[TrainingSegment], object], short: Shortages
    ) -> None:
        self._segment, self._pass, self._short = segment, run, short
        self._done: list[TrainingSegment] = []

    def slices(self, layers: int) -> Iterator[Slice]:
        """See `WindowSlices`."""
        yield self._run

    def end(self) -> list[TrainingSegment]:
        """See `WindowSlices`."""
        return self._done

    def _run(self) -> None:
        if self._segment.job not in self._short:
            with self._short.of(self._segment.job):
                self._pass(self._segment)
        self._done = [self._segment]


class BackwardSlices(WindowSlices[BackwardWindow]):
    """Windows that go back: `backward` takes them through layers, those of several jobs at one layer in
    groups of at most `rows` rows."""

    NAME: ClassVar[str] = "slice back"

    def __init__(
        self,
        windows: Mapping[TrainingSegment, BackwardWindow],
        short: Shortages,
        rows: int,
        check: Callable[[], object],
        backward: GoBack,
    ) -> None:
        super().__init__(windows, short)
        self._rows, self._check, self._backward = rows, check, backward

    def end(self) -> list[TrainingSegment]:
        """Leaves each window's gradient where its next layer finds it."""
        for segment, window in self._windows.items():
            if segment.job not in self._short:
                with self._short.of(segment.job):
                    window.backward.finish(window)
        return super().end()

    def _run(self, layers: range) -> None:
        windows = [(segment.job, window) for segment, window in self._windows.items()]
        self._backward(layers, windows, self._rows, self._short, self._check)


Sliced = ForwardSlices | TailSlice | BackwardSlices


def run_slices(
    ways: Iterator[Sliced], layers: int, pause: TrainingPause, under_way: SlicesUnderWay
) -> list[TrainingSegment]:
    """Runs slices until a pause, or until one fails; returns the segments with the layers that they have
    passed."""
    done: list[TrainingSegment] = []
    for way in ways:
        is_through = True
        for run in way.slices(layers):
            with span(way.NAME):
                is_through = not pause.is_due and pause.ran(run)
            if not is_through:
                break
            under_way.add()
        done += way.end()
        if not is_through or pause.is_due:  # what would go another way is not even looked up
            break
    return done
