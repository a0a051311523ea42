"""The demo, act by act."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from transformers.utils import logging

from coserve import tiny
from coserve.config import EngineConfig
from coserve.core.checkout import measured_code
from coserve.core.control_group import usable_processors
from coserve.core.request import SLO
from coserve.demo import lessons as material
from coserve.demo import picture, tables
from coserve.demo.figures import AdapterFigures, DemoReport, StepLoss, way
from coserve.demo.lessons import Lesson
from coserve.demo.requests import DemoRequest, Questions, RequestSource, at_once
from coserve.demo.score import Score, score_model
from coserve.demo.target import DemoTarget, Interrupts, add_untrained
from coserve.demo.trace import TraceRequests, describe, read_load
from coserve.demo.trainer import trainer
from coserve.demo.view import DemoView
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.engine.remembered import processor_name
from coserve.errors import ModelNotFound, ServerError
from coserve.kernels.cpu import choose_dtype
from coserve.schedule.policies import make_policy
from coserve.simulate.replay import LoadResult, replay
from coserve.worker.compute_threads import set_threads
from coserve.workload.requests import TimedJob, Workload

SHOWN_QUESTIONS: Final = 3  # of each task, side by side
LONGEST_EXAMPLE: Final = 512  # tokens of one from a file; longer ones would leave few steps in the time
TURNS: Final = "temporal:8,grain=batch"
WARM_UP: Final = 64  # requests before: the first steps of each size are slower
_LAST_STEPS: Final = 5  # whose mean is the loss that training came to


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the demo. `seconds` is the time of the load, which is done in four ways."""

    data: Path | None = None
    trace: Path | None = None
    model: str | None = None  # None is the embedded one
    device: str = "cpu"
    seconds: float = 25.0
    share: float = 0.5  # of the measured capacity, at which requests arrive
    slowdown: float = 1.5  # by training, that each request states

    @property
    def questions(self) -> int:
        """Held-out questions of each task."""
        return max(4, min(50, int(4 * self.seconds)))


class Story:
    """Runs the demo once. `report` holds the figures measured so far."""

    def __init__(self, options: Options, view: DemoView) -> None:
        self.options, self.view, self.report = options, view, DemoReport()
        self._interrupts = Interrupts()

    def tell(self) -> DemoReport:
        """Runs all acts, or those before Ctrl-C, then shows the closing tables and the picture."""
        started = time.monotonic()
        try:
            self._announce()
            self._open()
            with self._interrupts.listening():
                self._measure_capacity()
                self._answer_alone()
                self._score_base()
                self._coserve()
                self._score_all()
                self._take_turns()
                self._use_two_processes()
        except KeyboardInterrupt:
            self.report.stopped = True
        finally:
            self.view.close()
        self.report.seconds = time.monotonic() - started
        if self.report.stopped:
            self.view.say("Stopped by Ctrl-C. Measured until then:")
        for sheet in tables.closing(self.report):
            self.view.sheet(sheet, closing=True)
        self.view.picture(picture.text(self.report))
        self.view.say(f"{self.report.seconds:.0f} s in all.")
        return self.report

    # The acts

    def _announce(self) -> None:
        for line in (
            "coserve answers requests and trains adapters in the same steps, on one frozen model, the base.",
            f"The same {self.options.seconds:g} s of requests, at {self.options.share:.0%} of this machine's "
            "capacity, in four ways:",
            "1. alone: answers without training, a fourth of them by two LoRA adapters.",
            "2. coserve: beside the training of these adapters, whose newest versions answer.",
            "3. taking turns: training stops all answers for whole mini-batches.",
            "4. two processes: an engine that answers and one that trains share the machine.",
            "Base and adapters answer held-out questions before and after the second.",
        ):
            self.view.say(line)

    def _open(self) -> None:
        """Loads the model, the questions, and the trace."""
        started = time.monotonic()
        report, options = self.report, self.options
        report.busy, report.processors = _load_average(), usable_processors()
        self._model = options.model or _embedded()
        self.engine, why = open_engine(self._model, options.device)
        report.code = measured_code()
        report.date = datetime.now(UTC).date().isoformat()
        report.processor, report.torch_version = processor_name(), torch.__version__
        report.threads, report.device = torch.get_num_threads(), options.device
        report.model = options.model or "coserve-tiny"
        report.dtype = str(self.engine.base.dtype).removeprefix("torch.")
        report.data = None if options.data is None else options.data.name
        report.share, report.slowdown = options.share, options.slowdown
        self.lessons = self._lessons()
        add_untrained(self.engine, self.lessons)
        report.adapters = [AdapterFigures(lesson.adapter, lesson.about) for lesson in self.lessons]
        self._source = self._make_source()
        took = time.monotonic() - started
        threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
        self.view.say(f"{report.model} is loaded after {took:.1f} s: {threads}, {why}.")
        if report.is_busy:
            self.view.say(
                f"The machine is busy: a load average of {report.busy:.1f} on {report.processors} processors."
            )

    def _measure_capacity(self) -> None:
        """Asks many requests at once, and plans the arrivals at a share of the rate of their answers."""
        report, seconds = self.report, self.options.seconds
        self._play("Warm-up", at_once(self._source, WARM_UP))
        load, _ = self._play("Capacity", at_once(self._source, tables.BACKLOG))
        answered = sum(bool(answer.tokens) for answer in load.answers)
        report.capacity = max(answered, 1) / (load.finished_at - load.started)
        rate = report.share * report.capacity
        self._requests = self._source.requests(rate, seconds)
        report.requests = len(self._requests)
        self.view.say(
            f"Capacity: {report.capacity:.3g} requests/s when {tables.BACKLOG} are asked at once. "
            f"{report.requests} will arrive in {seconds:g} s."
        )
        if isinstance(self._source, TraceRequests):
            source = self._source.load
            said, report.trace = describe(source.at_rate(rate), source, report.capacity)
            self.view.say(said)

    def _answer_alone(self) -> None:
        self.view.say("1. Answers alone:")
        self._alone = self._do(tables.ALONE)

    def _coserve(self) -> None:
        """Trains both adapters at once while requests go on, some of them to these adapters."""
        name = self.lessons[0].adapter
        self.view.say(f"2. The same beside training ({name}@3 is {name} after 3 optimizer steps):")
        self._do(tables.COSERVED, self.lessons)
        for learned in self.report.adapters:
            _note(self._jobs[learned.adapter], learned)

    def _take_turns(self) -> None:
        """Trains both adapters anew, by a policy that stops answers meanwhile."""
        self.view.say("3. The same with answers and training in turns:")
        usual = self.engine.scheduler.policy
        self.engine.scheduler.policy = make_policy(TURNS)
        try:
            self._do(tables.TURNS, self.lessons)
        finally:
            self.engine.scheduler.policy = usual

    def _use_two_processes(self) -> None:
        """Answers here while another process trains both adapters, each with half of the threads."""
        self.view.say("4. The same with training in another process, which loads the model first:")
        threads, dtype, device = self.report.threads, self.report.dtype, self.options.device
        half = max(threads // 2, 1)
        config = EngineConfig(device, half, dtype, policy=TURNS, calibrate=False)
        try:
            with _half_of(threads), trainer(self._model, config, self.lessons) as other:
                other.begin()
                load, _ = self._play(tables.PROCESSES, self._requests)
                load.trained, losses = other.end(load.started)
        except ServerError as error:  # of memory, say, which this way takes twice
            self.view.say(f"There are no figures of this way: {error}")
        else:
            self._note_way(tables.PROCESSES, load, losses)

    def _score_base(self) -> None:
        """Scores the base, which equals untrained adapters."""
        self.before = {lesson.adapter: self._score(lesson, None) for lesson in self.lessons}
        for lesson, learned in zip(self.lessons, self.report.adapters, strict=True):
            marks = self.before[lesson.adapter]
            learned.held_out, learned.held_out_loss_before = len(marks.answers), marks.loss
            learned.exact_before = marks.share if lesson.exact else None
        told = [
            f"{lesson.adapter} ({lesson.about}): {_result(lesson, self.before[lesson.adapter])}"
            for lesson in self.lessons
        ]
        self.view.say(f"The base on the held-out questions of the adapters to come. {'; '.join(told)}.")

    def _score_all(self) -> None:
        """Scores the base and both adapters on the same questions."""
        self.view.say("Base and adapters on the held-out questions:")
        models = {"base": None, **{lesson.adapter: lesson.adapter for lesson in self.lessons}}
        asked = (
            self.lessons if self._exact else self.lessons[:1]
        )  # the halves of a file share their questions
        after = {
            lesson.adapter: {name: self._score(lesson, adapter) for name, adapter in models.items()}
            for lesson in asked
        }
        for lesson in asked:
            self.view.sheet(tables.side_by_side(lesson, after[lesson.adapter], SHOWN_QUESTIONS))
        for lesson, learned in zip(self.lessons, self.report.adapters, strict=True):
            marks = after.get(lesson.adapter, after[asked[0].adapter])[lesson.adapter]
            learned.held_out_loss_after = marks.loss
            learned.exact_after = marks.share if lesson.exact else None
        if self._exact:
            self.view.sheet(tables.scores(self.lessons, self.before, after))

    # Parts of the acts

    def _do(self, name: str, lessons: Sequence[Lesson] = ()) -> LoadResult:
        """Does the load in one way, and notes its figures."""
        load, losses = self._play(name, self._requests, lessons)
        self._note_way(name, load, losses)
        return load

    def _play(
        self, act: str, requests: Sequence[DemoRequest], lessons: Sequence[Lesson] = ()
    ) -> tuple[LoadResult, list[StepLoss]]:
        """Replays requests beside the training of some lessons, which ends with the last answer. An answer
        that is not complete when twice the time is over is given up."""
        seconds = self.options.seconds
        target = DemoTarget(self.engine, self.view, self._interrupts, act, seconds, lessons)
        jobs = tuple(TimedJob(0.0, lesson.adapter, (), 1) for lesson in lessons)
        load = replay(target, Workload(act, act, seconds, tuple(requests), jobs), seconds)
        self._jobs = target.jobs
        for job in self._jobs.values():
            if job.error is not None:
                self.view.say(f"Training of {job.adapter} failed: {job.error}")
        return load, target.losses

    def _note_way(self, name: str, load: LoadResult, losses: Sequence[StepLoss]) -> None:
        alone = None if name == tables.ALONE else self._alone
        self.report.ways.append(way(name, load, losses, alone, self.options.slowdown, self.report.requests))

    @property
    def _exact(self) -> bool:
        return all(lesson.exact for lesson in self.lessons)

    def _lessons(self) -> list[Lesson]:
        text, data = self.engine.text, self.options.data
        assert text is not None, "a model from a folder or the hub has a tokenizer"
        if data is None:
            return material.new_tasks(text.tokenizer, self.options.questions)
        longest = min(LONGEST_EXAMPLE, self.engine.base.max_positions - 1)
        found, said = material.from_file(data, text.tokenizer, self.options.questions, longest)
        self.view.say(said)
        return found

    def _make_source(self) -> RequestSource:
        engine, slo = self.engine, SLO(slowdown=self.options.slowdown)
        assert engine.text is not None, "a model from a folder or the hub has a tokenizer"
        if self.options.trace is None:
            return Questions(engine.text, self.lessons, slo)
        tokens = [token for t in material.texts(self.lessons) for token in engine.text.encode(t)]
        return TraceRequests(
            read_load(self.options.trace, engine.base.max_positions), tokens, self.lessons, slo
        )

    def _score(self, lesson: Lesson, adapter: str | None) -> Score:
        return score_model(self.engine, self._step, lesson.held_out, adapter)

    def _step(self) -> None:
        self._interrupts.check()
        self.engine.step()


def open_engine(model: str | Path, device: str) -> tuple[Engine, str]:
    """An engine in the precision that suits the device, and a sentence that says which and why. Arrivals
    pause its training, as in a server."""
    logging.disable_progress_bar()  # a loading bar would stand in the middle of the view
    dtype, why = ("bfloat16", "in bfloat16") if device != "cpu" else choose_dtype()
    config = EngineConfig(dtype=dtype, device=device, scheduler={"interruptible": True})
    return Engine(model, config), why


@contextmanager
def _half_of(threads: int) -> Iterator[None]:
    """Computes with half of the threads during the block, on as many processors as there are threads: so do
    processes that start in it, and two of them have no more of the machine than one has otherwise."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if processors:
        os.sched_setaffinity(0, sorted(processors)[:threads])
    set_threads(max(threads // 2, 1))
    try:
        yield
    finally:
        set_threads(threads)
        if processors:
            os.sched_setaffinity(0, processors)


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:  # as where there is no such count
        return None


def _embedded() -> Path:
    try:
        return tiny.path()
    except FileNotFoundError as error:
        raise ModelNotFound(str(error)) from error


def _result(lesson: Lesson, marks: Score) -> str:
    loss = f"loss {marks.loss:.2f} nats per token"
    return f"{marks.right} of {len(marks.answers)} right, {loss}" if lesson.exact else loss


def _note(job: FineTuning, learned: AdapterFigures) -> None:
    """Writes a job's steps and losses into its figures, whether or not it ended early."""
    losses = [updated.loss for updated in job.history]
    learned.steps = len(losses)
    if losses:
        newest = losses[-_LAST_STEPS:]
        learned.loss_first, learned.loss_last = losses[0], sum(newest) / len(newest)
