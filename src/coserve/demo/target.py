"""The demo's engine as the target of a load: shows the load on screen and notes the losses of training."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.events import Event, StepDone, TokenEvent
from coserve.core.sequence import Sequence as Answer
from coserve.demo.figures import RateMeter, StepLoss
from coserve.demo.lessons import Lesson
from coserve.demo.requests import DemoRequest
from coserve.demo.view import DemoView, Exchange, JobProgress, Snapshot
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.simulate.driven import EngineTarget
from coserve.simulate.replay import Pressing, nobody
from coserve.train.config import TrainingConfig
from coserve.train.fresh import fresh_adapter
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import TimedJob, TimedRequest

NEWEST: Final = 1500  # times between tokens that the figures on screen look back on
LORA: Final = LoRAConfig(rank=16, alpha=32.0)
_ENDLESS: Final = 1_000_000  # optimizer steps: more than any load lasts
# At a constant rate the number of steps need not be known in advance, and every way has the same schedule.
TRAINING: Final = TrainingConfig(
    learning_rate=3e-3,
    batch_size=4,
    schedule="constant",
    warmup_steps=3,
    epochs=_ENDLESS,
    max_steps=_ENDLESS,
    keep=SavePolicy.EVERYTHING,
)


def add_untrained(engine: Engine, lessons: Sequence[Lesson]) -> None:
    """Adds an untrained adapter for each lesson, so that every way of doing the load serves as many."""
    for lesson in lessons:
        engine.adapters.add(fresh_adapter(engine.base, _untrained(lesson.adapter), LORA, TRAINING.seed))


def _untrained(adapter: str) -> str:
    return f"untrained-{adapter}"


def start_lesson(engine: Engine, lesson: Lesson) -> FineTuning:
    """Starts to train a lesson's adapter, until it is cancelled."""
    return engine.finetune(lesson.examples, lesson.adapter, LORA, TRAINING)


class Interrupts:
    """Has the first Ctrl-C take effect between two steps; a second one interrupts at once."""

    def __init__(self) -> None:
        self._came = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens during the block."""
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raises KeyboardInterrupt once Ctrl-C was pressed."""
        if self._came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class DemoTarget(EngineTarget):
    """An engine that answers requests of the demo and trains its lessons, on screen.

    Prompts share what they have in common with others of one load alone (`act` is their scope): what a load
    has computed does not make the next one's answers faster.
    """

    def __init__(
        self,
        engine: Engine,
        view: DemoView,
        interrupts: Interrupts,
        act: str,
        seconds: float,
        lessons: Sequence[Lesson] = (),
    ) -> None:
        super().__init__(engine)
        self._view, self._interrupts, self._act, self._seconds = view, interrupts, act, seconds
        self._lessons = {lesson.adapter: lesson for lesson in lessons}
        self.jobs: dict[str, FineTuning] = {}
        self.losses: list[StepLoss] = []
        self._open: dict[int, tuple[str, Completion]] = {}
        self._last: dict[int, float] = {}  # when an answer had its newest token
        self._gaps: deque[float] = deque(maxlen=NEWEST)
        self._ended: deque[Exchange] = deque(maxlen=8)
        self._meter = RateMeter(engine.scheduler.stats, engine.clock())
        self._shown = engine.clock()

    def ask(self, request: TimedRequest, arrival: float) -> Answer:
        """See `LoadTarget`. For an adapter that does not train here an untrained one answers."""
        assert isinstance(request, DemoRequest), "the demo's loads are made of its requests"
        adapter = request.adapter
        if adapter is not None and adapter not in self.jobs:
            adapter = _untrained(adapter)
        handle = self.engine.generate(
            request.prompt, adapter, request.sampling, request.slo, arrival, scope=self._act
        )
        self._open[handle.sequence.key] = request.question, handle
        return handle.sequence

    def start(self, job: TimedJob) -> Callable[[], None]:
        """See `LoadTarget`."""
        self.jobs[job.adapter] = start_lesson(self.engine, self._lessons[job.adapter])
        return self.jobs[job.adapter].cancel

    def wait(self, seconds: float) -> None:
        """See `LoadTarget`."""
        self._interrupts.check()
        super().wait(seconds)

    def step(self, pressing: Pressing = nobody) -> list[Event]:
        """See `LoadTarget`."""
        self._interrupts.check()
        events = super().step(pressing)
        now = self.clock()
        for event in events:
            if isinstance(event, TokenEvent):
                self._take(event, now)
            elif isinstance(event, StepDone):
                name = next(name for name, job in self.jobs.items() if job.job == event.job)
                self.losses.append(StepLoss(now - self._meter.started, name, event.updated.loss))
        if now >= self._shown + self._view.period:
            self._shown = now
            self._view.show(self._snapshot(now))
        return events

    def _take(self, event: TokenEvent, now: float) -> None:
        if event.key in self._last:
            self._gaps.append(now - self._last[event.key])
        self._last[event.key] = now
        if event.finish_reason is not None:
            del self._last[event.key]
            self._ended.append(_exchange(*self._open.pop(event.key)))

    def _snapshot(self, now: float) -> Snapshot:
        gaps = sorted(self._gaps)
        under_way = [_exchange(*one) for one in self._open.values()]
        return Snapshot(
            act=self._act,
            elapsed=now - self._meter.started,
            left=self._meter.started + self._seconds - now,
            rates=self._meter.now(self.scheduler.stats, now),
            gap_p50=gaps[len(gaps) // 2] if gaps else None,
            gap_p99=gaps[len(gaps) * 99 // 100] if gaps else None,
            jobs=tuple(
                JobProgress(name, len(job.history), [u.loss for u in job.history])
                for name, job in self.jobs.items()
            ),
            under_way=tuple(sorted(under_way, key=lambda one: not one.adapted)),
            completed=tuple(reversed(self._ended)),
        )


def _exchange(question: str, handle: Completion) -> Exchange:
    version = handle.sequence.request.adapter
    return Exchange(version or "base", question, handle.text, version is not None)
