"""The engine's own way: answers without a graph, training by tape and windows, all by its own executor."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

import torch

from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.core.plan import Plan
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.core.sequence import Sequence as Answer
from coserve.engine.engine import Engine
from coserve.errors import ConfigError, OutOfMemory
from coserve.memory.ledger import Account
from coserve.plan.nodata import without_data
from coserve.plan.stages import Load, Program, Stage
from coserve.plan.subject import Subject
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from coserve.train.config import TrainingConfig
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.train.save_policy import save_policy
from coserve.train.session import TrainingSession
from coserve.train.supervised import SupervisedSteps

_JOB: Final = "plan"
_NO_LIMIT: Final = 1 << 60  # bytes; what is planned for need not fit here


class OurRun:
    """`Program`s of the engine.

    All prompts are read in one step, and windows are whole micro-batches: the most that a scheduler may ask
    for. A job has as many micro-batches under way as the engine lets it have by default.
    """

    def __init__(self, subject: Subject, program: Program, device: torch.device) -> None:
        self._subject, self._program, self._device = subject, program, device
        self.cache = self.optimizer = 0

    def go(self) -> Iterator[Stage]:
        load = self._program.load
        engine = Engine(self._subject.load(), self.config(_NO_LIMIT))
        self.cache = engine.executor.attention.nbytes
        yield Stage.LOADED
        self._answer(engine, load)
        yield Stage.INFERENCE
        if not self._program.trains:
            return
        session, steps = self._start(engine)
        for step in range(2):
            for group in _groups(steps.next_step(count()), engine.scheduler.config.micro_batches_in_flight):
                for micro_batch in group:
                    self._pass(engine, micro_batch, Direction.TRAIN_FORWARD)
                self.optimizer = session.held[Account.OPTIMIZERS] + session.held[Account.ADAPTERS]
                if not step:
                    yield Stage.FORWARD
                for micro_batch in group:
                    self._pass(engine, micro_batch, Direction.LOSS)
                    self._pass(engine, micro_batch, Direction.BACKWARD)
            if not step:
                yield Stage.BACKWARD
            self.optimizer = session.held[Account.OPTIMIZERS] + session.held[Account.ADAPTERS]
            engine.executor.run(Plan(updates=(steps.optim_step,)))
            steps.ended(session.current.key)
        yield Stage.STEP

    def config(self, memory: int) -> EngineConfig:
        """The engine's settings with so many bytes for everything."""
        return EngineConfig(
            device=str(self._device),
            cache_tokens=self._program.load.cache_tokens,
            memory=memory,
            calibrate=False,
        )

    def job(self) -> tuple[list[Example], TrainingConfig]:
        """Examples of two optimizer steps, and how they are trained on."""
        load = self._program.load
        examples = [Example((0,) * load.length, (0,) * load.length)] * (2 * load.batch)
        keep = save_policy(self._program.keep)
        return examples, TrainingConfig(learning_rate=1e-6, batch_size=load.batch, keep=keep)

    def _answer(self, engine: Engine, load: Load) -> None:
        """Prompts in one step, as far as the cache holds them."""
        pages = -(-(load.length + 1) // engine.config.page_size)
        answers = []
        for number in range(min(load.batch, engine.config.pages // pages, engine.config.max_running)):
            answer = Answer(-1 - number, Request(_JOB, (0,) * load.length, SamplingParams(seed=0)))
            answer.pages = list(range(number * pages, (number + 1) * pages))
            answers.append(answer)
        if answers:
            engine.executor.run(inference_plan((answer, 0, load.length) for answer in answers))
            engine.executor.run(Plan(released=tuple(answer.key for answer in answers)))

    def _start(self, engine: Engine) -> tuple[TrainingSession, SupervisedSteps]:
        examples, config = self.job()
        adapter = fresh_adapter(engine.base, _JOB, settings_of(self._program.parts), 0)
        virtual = adapter.virtual.given_count, adapter.virtual.prompt_count
        base = engine.base
        steps = SupervisedSteps(_JOB, adapter.key, examples, config, base.depth, base.row_buckets, *virtual)
        return engine.executor.open_session(_JOB, adapter, steps.session), steps

    def _pass(self, engine: Engine, micro_batch: MicroBatch, direction: Direction) -> None:
        """All its rows in one window."""
        depth = engine.base.depth
        span = Span(depth, depth + 1) if direction is Direction.LOSS else Span(0, depth)
        segment = training_segment(micro_batch, 0, micro_batch.length, direction, span)
        engine.executor.run(Plan(training=(segment,), micro_batches=announce_batches([micro_batch])))


def refusal(subject: Subject, program: Program, memory: int, on_cpu: bool = True) -> str:
    """What a server's engine with so many bytes would say to the program, settings that fit included; empty
    where it would take it. Asked of the engine itself, on tensors without data. On a CPU what libraries build
    comes out of the same bytes."""
    run = OurRun(subject, program, torch.device("cpu"))
    with without_data():
        try:
            engine = Engine(subject.build(), run.config(memory))
            if on_cpu:
                engine.admission.count_process(grown=0)  # nothing is loaded here
            if program.trains:
                examples, config = run.job()
                engine.finetune(examples, _JOB, settings_of(program.parts), config)
        except (ConfigError, OutOfMemory) as error:
            return str(error)
    return ""


def _groups(micro_batches: Sequence[MicroBatch], size: int) -> Iterator[Sequence[MicroBatch]]:
    """Those that are under way at the same time."""
    for start in range(0, len(micro_batches), size):
        yield micro_batches[start : start + size]
