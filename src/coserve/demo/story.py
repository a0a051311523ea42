"""The demo, act by act."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.checkout import measured_code
from coserve.core.job_status import JobStatus
from coserve.core.request import SLO
from coserve.demo import lessons as material
from coserve.demo import tables
from coserve.demo.acts import ActRunner, open_engine
from coserve.demo.bounds import describe, keepable, verdict
from coserve.demo.figures import AdapterFigures, Bounds, DemoReport, Phase
from coserve.demo.lessons import Lesson
from coserve.demo.request_sources import ConversationSources, RequestSources, TraceSources
from coserve.demo.score import Score, score_model
from coserve.demo.trace import read_load
from coserve.demo.view import DemoView
from coserve.engine.finetuning import FineTuning
from coserve.engine.remembered import processor_name
from coserve.errors import ModelNotFound
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy

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
    first_token: float = 1.0  # bound that each request states, seconds
    between_tokens: float = 0.05  # likewise: 20 tokens/s; a person reads about five

    @property
    def bounds(self) -> Bounds:
        """Bounds that each request states, where this machine keeps them."""
        return Bounds(self.first_token, self.between_tokens)

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
                self._measure_again()
                self._score_all()
        except KeyboardInterrupt:
            self.report.stopped = True
        finally:
            self.view.close()
        self.report.seconds = time.monotonic() - started
        if self.report.stopped:
            self.view.say("Stopped by Ctrl-C. Measured until then:")
        for sheet in tables.closing(self.report):
            self.view.sheet(sheet, closing=True)
        self.view.say(f"{self.report.seconds:.0f} s in all.")
        return self.report

    # The acts

    def _announce(self) -> None:
        traced = self.options.trace is not None
        who = "a trace's requests" if traced else f"{self.options.conversations} conversations"
        for line in (
            "coserve answers requests and trains adapters in the same steps, on one frozen model, the base.",
            f"1. Answers to {who}, without training: what this machine does for them alone.",
            "2. The same load while two LoRA adapters are trained; some of the requests ask these adapters.",
            "   Then once more without training.",
            "3. Base and adapters answer held-out questions; the base has answered them before training too.",
            f"Each request states bounds: {describe(self.options.bounds)}.",
        ):
            self.view.say(line)

    def _open(self) -> None:
        """Loads the model, the questions, and the trace."""
        started = time.monotonic()
        engine, why = open_engine(self.options.model or _embedded(), self.options.device)
        self.stage = ActRunner(engine, self.view)
        report = self.report
        report.code = measured_code()
        report.date = datetime.now(UTC).date().isoformat()
        report.processor, report.torch_version = processor_name(), torch.__version__
        report.threads, report.device = torch.get_num_threads(), self.options.device
        report.model = self.options.model or "coserve-tiny"
        report.dtype = str(engine.base.dtype).removeprefix("torch.")
        report.planned_seconds, report.conversations = self.options.seconds, self.options.conversations
        report.data = None if self.options.data is None else self.options.data.name
        report.asked = report.bounds = self.options.bounds
        self.lessons = self._lessons()
        report.adapters = [AdapterFigures(lesson.adapter, lesson.about) for lesson in self.lessons]
        self.sources = self._make_sources()
        took = time.monotonic() - started
        threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
        self.view.say(f"{report.model} is loaded after {took:.1f} s: {threads}, {why}.")

    def _measure_alone(self) -> None:
        """Answers requests without training. Where the bounds asked for are not kept, the smallest multiples
        that are take their place from then on, and the act is repeated with them."""
        if isinstance(self.sources, TraceSources):
            capacity = self.stage.play("Capacity", self.sources.backlog(), self._share(12))
            self.stage.go_on()
            said, self.report.trace = self.sources.fit(capacity)
            self.view.say(said)
        else:
            # The first steps of each size are slower: they would count for the act that comes first.
            self.stage.play("Warm-up", self.sources.alone(self.lessons), self._share(30))
            self.stage.go_on()
        self.view.say("1. Answers without training:")
        asked, alone = self.options.bounds, self._play_alone(self.options.bounds)
        self.report.alone = alone
        self.stage.go_on()
        self.view.say(verdict(asked, alone))
        bounds = keepable(asked, alone)
        if bounds != asked:
            self.report.bounds = bounds
            self.view.say(f"From here on: {describe(bounds)}. Answers without training once more:")
            alone = self._play_alone(bounds)
        self.report.alone = alone
        self.stage.go_on()

    def _measure_again(self) -> None:
        """Answers the same requests without training once more: what else runs on a machine, and its clock
        rate, change within minutes."""
        assert self.report.bounds is not None
        self.view.say("Answers without training again, as machines change within minutes:")
        again = self._play_alone(self.report.bounds)
        self.stage.go_on()  # a part of an act compares with nothing
        self.report.alone_again = again

    def _play_alone(self, bounds: Bounds) -> Phase:
        """Measures the load without training.

        Conversations last until there are enough answers for a 99th percentile. A trace's arrivals differ
        from stretch to stretch: this one lasts as long as training will.
        """
        part = 7.5 if self.report.trace is None else 1.0
        return self.stage.play(
            "Answers without training", self.sources.alone(self.lessons), self._share(part), bounds.slo,
            answers=tables.FEWEST, longest=self.options.seconds,
        )  # fmt: skip

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

    def _train(self) -> None:
        """Trains both adapters at once while requests go on, some of them to these adapters."""
        plans = self._plan_training()
        engine = self.stage.engine
        jobs = [
            engine.finetune(lesson.examples, lesson.adapter, LORA, plan)
            for lesson, plan in zip(self.lessons, plans, strict=True)
        ]
        name = self.lessons[0].adapter
        self.view.say(f"2. The same load beside training ({name}@3 is {name} after 3 optimizer steps):")
        for job in jobs:
            if job.status == JobStatus.QUEUED:
                self.view.say(f"{job.adapter} is not trained at the same time: it {job.reason}.")
        longest = self.options.seconds + max(self.options.seconds * OVERTIME, _GRACE)
        self.report.training = self.stage.play(
            "Answers beside training", self.sources.taught(self.lessons), longest, self._slo, jobs
        )
        for job, learned in zip(jobs, self.report.adapters, strict=True):
            _note(job, learned)
            if job.error is not None:
                self.view.say(f"Training of {job.adapter} failed: {job.error}")
            job.cancel()
        self.stage.go_on()

    def _score_all(self) -> None:
        """Scores the base and both adapters on the same questions."""
        self.view.say("3. Base and adapters on the held-out questions:")
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
    def _slo(self) -> SLO:
        """Bounds that requests state beside training."""
        assert self.report.bounds is not None, "bounds are known once the model is loaded"
        return self.report.bounds.slo

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
        assert engine.text is not None, "a model from a folder or the hub has a tokenizer"
        tokens = [token for t in material.texts(self.lessons) for token in engine.text.encode(t)]
        return TraceSources(read_load(self.options.trace, engine.base.max_positions), tokens, seats)

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
            engine.adapters.unload(job.adapter)
        self.stage.go_on()
        rows = pace.training_tokens_per_second * self.options.seconds / len(jobs)
        plans = []
        for lesson, learned in zip(self.lessons, self.report.adapters, strict=True):
            mean = sum(map(len, lesson.examples)) / len(lesson.examples)
            learned.planned = max(round(rows / (mean * TRAINING.batch_size)), 1)
            epochs = -(-learned.planned * TRAINING.batch_size // len(lesson.examples))
            plans.append(replace(TRAINING, max_steps=learned.planned, epochs=epochs + 1))
        steps = " and ".join(str(plan.max_steps) for plan in plans)
        self.view.say(
            f"A rehearsal of {pace.seconds:.1f} s trained {pace.training_tokens_per_second:.0f} tokens/s "
            f"beside the answers. At that rate {steps} optimizer steps take {self.options.seconds:.0f} s; "
            "their number is set now, as the learning rate falls to 0 by the last one."
        )
        return plans


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
