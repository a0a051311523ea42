"""The demo, act by act."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.demo import lessons as material
from coserve.demo import tables
from coserve.demo.acts import ActRunner, open_engine
from coserve.demo.figures import AdapterFigures, DemoReport
from coserve.demo.lessons import Lesson
from coserve.demo.request_sources import ConversationSources, RequestSources, TraceSources
from coserve.demo.score import Score, score_model
from coserve.demo.tables import milliseconds
from coserve.demo.trace import read_load
from coserve.demo.view import DemoView
from coserve.engine.finetuning import FineTuning
from coserve.errors import ModelNotFound
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy

SLO_FACTOR: Final = 2.0  # the bound between tokens, as a multiple of the p99 without training
SHOWN_QUESTIONS: Final = 3  # of each task, side by side
LONGEST_EXAMPLE: Final = (
    512  # tokens of an example from a file; longer ones would leave few steps in the time
)
LORA: Final = LoRAConfig(rank=16, alpha=32.0)
TRAINING: Final = TrainingConfig(
    learning_rate=3e-3, batch_size=8, warmup_ratio=0.05, keep=SavePolicy.EVERYTHING
)
_EPOCHS: Final = 1000  # of a rehearsal, which time ends
_LAST_STEPS: Final = 5  # whose mean is the loss that training came to
OVERTIME: Final = 0.25  # of the planned seconds; training that takes longer is ended where it is
_GRACE: Final = 5.0  # seconds of overtime at least


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the demo. `seconds` is the time for training; the other acts are in proportion."""

    data: Path | None = None
    trace: Path | None = None
    model: str | None = None  # None is the embedded one
    device: str = "cpu"
    seconds: float = 75.0
    conversations: int = 8

    @property
    def questions(self) -> int:
        """Held-out questions of each task."""
        return max(4, min(50, int(self.seconds)))


class Story:
    """Runs the demo once. `report` holds the figures measured so far."""

    def __init__(self, options: Options, view: DemoView) -> None:
        self.options, self.view, self.report = options, view, DemoReport()

    def tell(self) -> DemoReport:
        """Runs all acts, or those before Ctrl-C, then shows the closing tables."""
        started = time.monotonic()
        try:
            self._announce()
            self._open()
            with self.stage.listening():
                self._measure_alone()
                self._score_base()
                self._train()
                self._score_all()
        except KeyboardInterrupt:
            self.report.stopped = True
        finally:
            self.view.close()
        self.report.seconds = time.monotonic() - started
        if self.report.stopped:
            self.view.say("Stopped. Measured until then:")
        for sheet in tables.closing(self.report):
            self.view.sheet(sheet, closing=True)
        self.view.say(f"{self.report.seconds:.0f} s in all.")
        return self.report

    # The acts

    def _announce(self) -> None:
        who = (
            "the requests of a trace are"
            if self.options.trace
            else f"{self.options.conversations} conversations are"
        )
        self.view.say(
            f"First {who} answered alone, then while two adapters are trained on the same frozen model,"
        )
        self.view.say(
            "in the same steps; before and after, base and adapters answer the same held-out questions."
        )

    def _open(self) -> None:
        """Loads the model, the questions, and the trace."""
        started = time.monotonic()
        engine, why = open_engine(self.options.model or _embedded(), self.options.device)
        self.stage = ActRunner(engine, self.view)
        report, threads = self.report, torch.get_num_threads()
        report.model = self.options.model or "coserve-tiny"
        report.dtype, report.threads = str(engine.base.dtype).removeprefix("torch."), threads
        self.lessons = self._lessons()
        report.adapters = [AdapterFigures(lesson.adapter, lesson.about) for lesson in self.lessons]
        self.sources = self._make_sources()
        took = time.monotonic() - started
        self.view.say(f"{report.model} is ready after {took:.1f} s, on {threads} threads. {why}.")

    def _measure_alone(self) -> None:
        """Answers requests without training, and derives the bound between tokens for the acts that train."""
        if isinstance(self.sources, TraceSources):
            capacity = self.stage.play("Capacity", self.sources.backlog(), self._share(12))
            self.stage.go_on()
            said, self.report.trace = self.sources.fit(capacity)
            self.view.say(said)
        # A trace comes at a quarter of the speed and in bursts: it takes longer to show what is usual.
        part = 7.5 if self.report.trace is None else 4
        self.report.alone = self.stage.play("Answers only", self.sources.alone(), self._share(part))
        self.stage.go_on()
        slowest = self.report.alone.between_tokens_p99
        if slowest is not None:
            self.report.slo_between_tokens = SLO_FACTOR * slowest
            self.view.say(
                f"99% of tokens came within {milliseconds(slowest)} of the one before. From now on each "
                f"request states {SLO_FACTOR:g} times that, {milliseconds(SLO_FACTOR * slowest)}, as its SLO."
            )

    def _score_base(self) -> None:
        """Scores the base, which equals untrained adapters."""
        self.before = {lesson.adapter: self._score(lesson, None) for lesson in self.lessons}
        for lesson, learned in zip(self.lessons, self.report.adapters, strict=True):
            marks = self.before[lesson.adapter]
            learned.held_out, learned.held_out_loss_before = len(marks.answers), marks.loss
            learned.exact_before = marks.share if lesson.exact else None
        told = [f"{lesson.adapter} {_result(lesson, self.before[lesson.adapter])}" for lesson in self.lessons]
        self.view.say(f"Held-out questions before training, asked of the base: {', '.join(told)}.")

    def _train(self) -> None:
        """Trains both adapters at once while requests go on, some of them to these adapters."""
        plans = self._plan_training()
        engine = self.stage.engine
        jobs = [
            engine.finetune(lesson.examples, lesson.adapter, LORA, plan)
            for lesson, plan in zip(self.lessons, plans, strict=True)
        ]
        names = " and ".join(f"{lesson.adapter} ({lesson.about})" for lesson in self.lessons)
        self.view.say(f"Training {names}, while the answers go on:")
        longest = self.options.seconds + max(self.options.seconds * OVERTIME, _GRACE)
        self.report.training = self.stage.play(
            "Answers and training", self.sources.taught(self.lessons), longest, self._slo, jobs
        )
        for job, learned in zip(jobs, self.report.adapters, strict=True):
            _note(job, learned)
            job.cancel()
        self.stage.go_on()

    def _score_all(self) -> None:
        """Scores the base and both adapters on the same questions."""
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

    @property
    def _slo(self) -> float | None:
        return self.report.slo_between_tokens

    @property
    def _exact(self) -> bool:
        return all(lesson.exact for lesson in self.lessons)

    def _share(self, part: float) -> float:
        """A duration in proportion to the training's, seconds."""
        return max(self.options.seconds / part, 1.0)

    def _lessons(self) -> list[Lesson]:
        text, data = self.stage.engine.text, self.options.data
        assert text is not None, "a model from a folder or the hub has a tokenizer"
        if data is None:
            return material.new_tasks(text.tokenizer, self.options.questions)
        longest = min(LONGEST_EXAMPLE, self.stage.engine.base.max_positions - 1)
        found, said = material.from_file(data, text.tokenizer, self.options.questions, longest)
        self.view.say(said)
        return found

    def _make_sources(self) -> RequestSources:
        engine, seats = self.stage.engine, self.options.conversations
        if self.options.trace is None:
            return ConversationSources(seats)
        text = [token for t in material.texts(self.lessons) for token in engine.tokenize(t)]
        return TraceSources(read_load(self.options.trace, engine.base.max_positions), text, seats)

    def _score(self, lesson: Lesson, adapter: str | None) -> Score:
        return score_model(self.stage.engine, self.stage.step, lesson.held_out, adapter)

    def _plan_training(self) -> list[TrainingConfig]:
        """Plans as many optimizer steps as fit into the time, at the pace of a rehearsal with throw-away
        adapters.

        The number must be known in advance, so that the learning rate's schedule ends at zero.
        """
        engine = self.stage.engine
        tried = [replace(lesson, adapter=f"try-{lesson.adapter}") for lesson in self.lessons]
        endless = replace(TRAINING, epochs=_EPOCHS, schedule="constant")
        jobs = [engine.finetune(lesson.examples, lesson.adapter, LORA, endless) for lesson in tried]
        pace = self.stage.play("Rehearsal", self.sources.taught(tried), self._share(15), self._slo)
        for job in jobs:
            job.cancel()
            engine.unload_adapter(job.adapter)
        self.stage.go_on()
        rows = pace.training_tokens_per_second * self.options.seconds / len(jobs)
        plans = []
        for lesson, learned in zip(self.lessons, self.report.adapters, strict=True):
            mean = sum(map(len, lesson.examples)) / len(lesson.examples)
            learned.planned = max(round(rows / (mean * TRAINING.batch_size)), 1)
            epochs = -(-learned.planned * TRAINING.batch_size // len(lesson.examples))
            plans.append(replace(TRAINING, max_steps=learned.planned, epochs=epochs + 1))
        self.view.say(
            f"A rehearsal trained {pace.training_tokens_per_second:.0f} tokens/s beside the answers: "
            f"{' and '.join(str(plan.max_steps) for plan in plans)} optimizer steps fit into "
            f"{self.options.seconds:.0f} s."
        )
        return plans


def _embedded() -> Path:
    try:
        return tiny.path()
    except FileNotFoundError as error:
        raise ModelNotFound(str(error)) from error


def _result(lesson: Lesson, marks: Score) -> str:
    loss = f"loss {marks.loss:.2f} per token"
    return f"{marks.right} of {len(marks.answers)} right, {loss}" if lesson.exact else loss


def _note(job: FineTuning, learned: AdapterFigures) -> None:
    """Writes a job's steps and losses into its figures, whether or not it ended early."""
    losses = [updated.loss for updated in job.history]
    learned.steps = len(losses)
    if losses:
        newest = losses[-_LAST_STEPS:]
        learned.loss_first, learned.loss_last = losses[0], sum(newest) / len(newest)
