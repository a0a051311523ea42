"""The two streams of a worker, answers and training: threads of a processor, or streams of a GPU."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from coserve.core.plan import BasePlan, Sampled, TrainingSegment
from coserve.core.step_trace import is_tracing, span
from coserve.worker.timer import DeviceTimer

T = TypeVar("T")
Answered = tuple[dict[int, Sampled], list[TrainingSegment]]  # tokens, and the windows that shared their pass
Answer = Callable[[BasePlan], Answered]
Train = Callable[[BasePlan], list[TrainingSegment]]
_ANSWERS, _TRAINING = range(2)


class Streams:
    """Runs the answers and the training of plans: one after the other on the caller's thread, or beside each
    other where a plan has a share. Answers are waited for; training beside them goes on through further
    steps, one piece at a time.

    On a processor a stream is a thread with its share of the compute threads. On a GPU it is a CUDA stream,
    and the GPU decides the share. There the training stream runs all of a step without a share, too: what
    training keeps from one step to the next is made, used and freed on this stream. The answers' stream runs
    the rest of a step while training is under way beside it, and commands.
    """

    def __init__(self, device: torch.device, answer: Answer, train: Train) -> None:
        """`answer` runs the passes of a plan, `train` its slices."""
        self._device, self.answer, self.train = device, answer, train
        self._compute_threads = torch.get_num_threads()
        self._threads: dict[tuple[int, float], ThreadPoolExecutor] = {}
        self._streams: list[Any] = [None, None]
        if device.type == "cuda":  # priorities: the lowest number goes first
            self._streams = [torch.cuda.Stream(device, priority) for priority in (-1, 0)]  # type: ignore[no-untyped-call]
        self._under_way: Future[tuple[list[TrainingSegment], DeviceTimer]] | None = None  # beside answers
        self._asked: Sequence[TrainingSegment] = ()  # of it
        self._trained: list[TrainingSegment] = []  # done, and not returned yet
        self._is_stopped = False  # some of what was asked for did not run, and nobody was told
        self._seconds = 0.0  # of training beside answers

    @property
    def is_training(self) -> bool:
        """Tells whether training is under way beside answers."""
        return self._under_way is not None

    def step(self, share: float | None = None) -> AbstractContextManager[None]:
        """Context of a step, or of a command: on a GPU its work goes to one stream, behind what the caller
        has launched, and the host waits for that stream."""
        return self._on(_TRAINING if share is None and not self.is_training else _ANSWERS)

    def queue(self) -> AbstractContextManager[None]:
        """As `step`, for work that the host waits for later."""
        return self._on(_TRAINING, waits=False)

    def settle(self) -> None:
        """Waits for training under way. Raises its error."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            trained, timer = under_way.result()
            self._seconds = timer.seconds
            self._note(self._asked, trained)

    def run(
        self, plan: BasePlan, again: bool
    ) -> tuple[dict[int, Sampled], tuple[TrainingSegment, ...], bool, tuple[float, float]]:
        """Runs a plan's passes and slices; `again` where its answers failed, and its training may be under
        way. Returns tokens, the finished training not yet returned, whether training that was asked for has
        ended before all of it ran, and the seconds that answers and this training took beside each other."""
        if plan.share is None:
            with _pass_span(plan):
                sampled, fused = self.answer(plan)
            self._note(plan.training, fused + self.train(plan))
            answering = 0.0
        else:
            sampled, answering = self._beside(plan, plan.share, again)
        done, self._trained = tuple(self._trained), []
        is_stopped, self._is_stopped = self._is_stopped, False
        seconds, self._seconds = (answering, self._seconds), 0.0
        return sampled, done, is_stopped, seconds

    def begin(self, place: int, share: float, work: Callable[[], T]) -> Future[T]:
        """Queues work on a stream, behind what the caller has launched; the future has its return value."""
        if (place, share) not in self._threads:
            count = max(1, round(share * self._compute_threads))
            self._threads[place, share] = ThreadPoolExecutor(1, "stream", torch.set_num_threads, (count,))
        before = None
        if self._device.type == "cuda":
            before = torch.cuda.current_stream(self._device).record_event()

        def on_stream() -> T:
            with self._on(place, before):
                return work()

        return self._threads[place, share].submit(on_stream)

    @contextmanager
    def _on(self, place: int, before: Any = None, waits: bool = True) -> Iterator[None]:
        """On a GPU work goes to a stream behind the event `before`, by default all that the caller has
        launched, and the host waits for the stream where it `waits`."""
        stream = self._streams[place]
        if stream is None:
            yield
            return
        stream.wait_event(before or torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(stream):
            yield
        if waits:
            stream.synchronize()

    def _note(self, asked: Sequence[TrainingSegment], trained: Sequence[TrainingSegment]) -> None:
        self._trained += trained
        self._is_stopped |= not {*asked} <= {*trained}

    def _beside(self, plan: BasePlan, share: float, again: bool) -> tuple[dict[int, Sampled], float]:
        """Returns tokens, and the seconds of their stream; without inference it waits for training."""
        if plan.training and not again:
            assert self._under_way is None, "one piece of training beside answers at a time"
            self._asked = plan.training
            self._under_way = self.begin(_TRAINING, 1 - share, partial(self._timed, self.train, plan))
        if not plan.inference:
            self.settle()
            return {}, 0.0
        (sampled, _), timer = self.begin(_ANSWERS, share, partial(self._timed, self.answer, plan)).result()
        if self._under_way is not None and self._under_way.done():
            self.settle()
        return sampled, timer.seconds

    def _timed(self, work: Callable[[BasePlan], T], plan: BasePlan) -> tuple[T, DeviceTimer]:
        timer = DeviceTimer(self._device)
        with _pass_span(plan) if work is self.answer else nullcontext():
            done = work(plan)
        timer.stop()
        return done, timer


def _pass_span(plan: BasePlan) -> AbstractContextManager[None]:
    """The span of a plan's passes of answers, by what is in them."""
    if not is_tracing() or not plan.inference:
        return nullcontext()
    lengths = [segment.length for segment in plan.inference]
    kinds = ("decode", any(one == 1 for one in lengths)), ("prompts", any(one > 1 for one in lengths))
    return span(" and ".join(name for name, there in kinds if there), sum(lengths))
