"""Lanes of a step side by side: a split of the processor's threads, or two streams on a GPU."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from coserve.core.plan import Lane, Sampled, TrainingSegment

T = TypeVar("T")
_Done = tuple[dict[int, Sampled], list[TrainingSegment]]  # tokens of a lane, and the training that ran


class Lanes:
    """Runs one piece of work a lane, each on its own share of `device`, side by side.

    On a processor a lane is a thread with its share of torch's threads; on a GPU, a thread with a stream of
    its own, and the GPU's scheduler decides the share.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = torch.get_num_threads()
        self._lanes: dict[tuple[int, float], tuple[ThreadPoolExecutor, Any]] = {}

    def begin(self, place: int, share: float, work: Callable[[], T]) -> Future[T]:
        """Queues work in the lane at `place`; the future has its return value."""
        if (place, share) not in self._lanes:
            self._lanes[place, share] = self._make(share)
        thread, stream = self._lanes[place, share]
        if stream is not None:  # the caller's work on its own stream comes first
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def on_stream() -> T:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                done = work()
            if stream is not None:
                stream.synchronize()
            return done

        return thread.submit(on_stream)

    def _make(self, share: float) -> tuple[ThreadPoolExecutor, Any]:
        if self._device.type == "cuda":
            return ThreadPoolExecutor(1, "lane"), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        threads = max(1, round(share * self._threads))
        return ThreadPoolExecutor(1, "lane", torch.set_num_threads, (threads,)), None


class LaneRunner:
    """Runs lanes of plans. One lane runs on the caller's thread; of two, inference is waited for, and
    training continues through further steps, one piece at a time."""

    def __init__(self, device: torch.device) -> None:
        self._lanes = Lanes(device)
        self._training: Future[tuple[_Done, float]] | None = None  # in a lane of its own
        self._asked: tuple[TrainingSegment, ...] = ()  # of it
        self._trained: list[TrainingSegment] = []  # done, and not returned yet
        self._is_stopped = False  # some of what was asked for did not run, and nobody was told
        self._seconds = 0.0  # of training in a lane of its own

    @property
    def is_training(self) -> bool:
        """Tells whether training is under way in a lane of its own."""
        return self._training is not None

    def settle(self) -> None:
        """Waits for training under way. Raises its error."""
        if self._training is not None:
            training, self._training = self._training, None
            (_, trained), self._seconds = training.result()
            self._note(self._asked, trained)

    def run(
        self, lanes: Sequence[Lane], work: Callable[[Lane], _Done], again: bool
    ) -> tuple[dict[int, Sampled], tuple[TrainingSegment, ...], bool, tuple[float, float]]:
        """Runs a plan's lanes; `again` where its answers failed, and its training may be under way. Returns
        tokens, the finished training not yet returned, whether training that was asked for has ended before
        all of it ran, and the seconds that inference and this training took side by side."""
        if len(lanes) == 1:
            (sampled, trained), answering = work(lanes[0]), 0.0
            self._note(lanes[0].training, trained)
        else:
            sampled, answering = self._run_split(lanes, work, again)
        done, self._trained = tuple(self._trained), []
        is_stopped, self._is_stopped = self._is_stopped, False
        seconds, self._seconds = (answering, self._seconds), 0.0
        return sampled, done, is_stopped, seconds

    def _note(self, asked: Iterable[TrainingSegment], trained: Sequence[TrainingSegment]) -> None:
        self._trained += trained
        self._is_stopped |= not {*asked} <= {*trained}

    def _run_split(
        self, lanes: Sequence[Lane], work: Callable[[Lane], _Done], again: bool
    ) -> tuple[dict[int, Sampled], float]:
        """Returns tokens, and their lane's seconds; without inference it waits for training."""
        answers, training = lanes
        if training.training and not again:
            assert self._training is None, "one piece of training beside inference at a time"
            self._asked = tuple(training.training)
            self._training = self._lanes.begin(1, training.share, partial(_timed, work, training))
        if not answers.inference:
            self.settle()
            return {}, 0.0
        answering = self._lanes.begin(0, answers.share, partial(_timed, work, answers))
        (sampled, _), seconds = answering.result()
        if self._training is not None and self._training.done():
            self.settle()
        return sampled, seconds


def _timed(work: Callable[[Lane], _Done], lane: Lane) -> tuple[_Done, float]:
    started = time.perf_counter()
    done = work(lane)
    return done, time.perf_counter() - started
