"""Runs programs on the engine's executor: inference without a graph, training by stored activations and
windows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Final

import torch

from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.core.plan import BasePlan
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.core.sequence import Sequence as Answer
from coserve.engine.engine import Engine
from coserve.errors import ConfigError, CoserveError, OutOfMemory
from coserve.executors.executor import OpenSession, ReadMemory
from coserve.memory.fake_tensors import fake_tensors
from coserve.memory.ledger import Account
from coserve.plan.stages import Program, ProgramSize, Stage, nobody
from coserve.plan.subject import Subject
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.fresh import sketch_adapter
from coserve.train.job import PreparedJob
from coserve.train.save_policy import save_policy
from coserve.train.supervised import SupervisedSteps

_JOB: Final = "plan"
_NO_LIMIT: Final = 1 << 60  # bytes; what is planned for need not fit here


class EngineRun:
    """`Program`s of the engine.

    All prompts pass in one step, and windows are whole micro-batches: the largest plans of a scheduler. A job
    has as many micro-batches under way as the engine lets it have by default.
    """

    def __init__(self, subject: Subject, program: Program, device: torch.device) -> None:
        self._subject, self._program, self._device = subject, program, device
        self.cache = self.optimizer = 0
        self.on_layer: Callable[[int], object] = nobody

    def go(self) -> Iterator[Stage]:
        load = self._program.load
        engine = Engine(self._subject.load(), self.config(_NO_LIMIT))
        self.cache = engine.executor.spec.cache_nbytes
        for number, block in enumerate(engine.base.chain.blocks):
            block.before_visit = partial(self.on_layer, number)
        yield Stage.LOADED
        self._answer(engine, load)
        yield Stage.INFERENCE
        if not self._program.trains:
            return
        steps = self._start(engine)
        for step in range(2):
            for group in _groups(steps.next_step(count()), engine.scheduler.config.micro_batches_in_flight):
                for micro_batch in group:
                    self._pass(engine, micro_batch, Direction.TRAIN_FORWARD)
                self.optimizer = _held(engine)
                if not step:
                    yield Stage.FORWARD
                for micro_batch in group:
                    self._pass(engine, micro_batch, Direction.LOSS)
                    self._pass(engine, micro_batch, Direction.BACKWARD)
            if not step:
                yield Stage.BACKWARD
            self.optimizer = _held(engine)
            (updated,) = engine.executor.run(BasePlan(updates=(steps.optim_step,))).updated.values()
            steps.ended(updated)
        yield Stage.STEP

    def config(self, memory: int, base_memory: int | None = None) -> EngineConfig:
        """The engine's settings with a budget of `memory` bytes, and of these `base_memory` for a base that
        is streamed."""
        return EngineConfig(
            device=str(self._device),
            cache_tokens=self._program.load.cache_tokens,
            memory=memory,
            base_memory="auto" if base_memory is None else base_memory,
            calibrate=False,
        )

    def job(self) -> tuple[list[Example], TrainingConfig]:
        """Examples of two optimizer steps, and their training settings. They begin with the tokens from which
        on an adapter acts, if it waits for any."""
        load, methods = self._program.load, settings_of(self._program.parts)
        first = next((own for one in methods if (own := getattr(one, "invocation", ()))), ())
        tokens = (*first, *(0,) * load.length)[: load.length]
        examples = [Example(tokens, (0,) * load.length)] * (2 * load.batch)
        keep = save_policy(self._program.keep)
        return examples, TrainingConfig(learning_rate=1e-6, batch_size=load.batch, keep=keep)

    @property
    def trains(self) -> bool:
        """Tells whether the program trains."""
        return self._program.trains

    def admit(self, engine: Engine) -> int | CoserveError:
        """Admits the program's job to an engine and cancels it; returns the bytes that the engine had
        reserved with it, or its refusal."""
        examples, config = self.job()
        try:
            job = engine.finetune(examples, _JOB, settings_of(self._program.parts), config, job=_JOB)
        except (ConfigError, OutOfMemory) as error:
            return error
        used = engine.memory.ledger.used
        job.cancel()
        engine.adapters.unload(_JOB)
        return used

    def _answer(self, engine: Engine, load: ProgramSize) -> None:
        """Runs all prompts in one step, as many as the cache holds."""
        pages = -(-(load.length + 1) // engine.config.page_size)
        answers = []
        for number in range(min(load.batch, engine.config.pages // pages, engine.config.max_running)):
            answer = Answer(-1 - number, Request(_JOB, (0,) * load.length, SamplingParams(seed=0)))
            answer.pages = list(range(number * pages, (number + 1) * pages))
            answers.append(answer)
        if answers:
            engine.executor.run(inference_plan((answer, 0, load.length) for answer in answers))
            engine.executor.run(BasePlan(released=tuple(answer.key for answer in answers)))

    def _start(self, engine: Engine) -> SupervisedSteps:
        examples, config = self.job()
        methods, base = settings_of(self._program.parts), engine.base
        first = sketch_adapter(base, _JOB, methods, config.seed)
        job = PreparedJob(_JOB, _JOB, Prepared(tuple(examples)), methods, config, first, is_fresh=True)
        steps = SupervisedSteps(job, base)
        engine.executor.call(OpenSession.of(job, 0, steps.session))
        return steps

    def _pass(self, engine: Engine, micro_batch: MicroBatch, direction: Direction) -> None:
        """Runs all rows of a micro-batch in one window."""
        depth = engine.base.depth
        span = Span(depth, depth + 1) if direction is Direction.LOSS else Span(0, depth)
        segment = training_segment(micro_batch, 0, micro_batch.length, direction, span)
        engine.executor.run(BasePlan(training=(segment,), micro_batches=announce_batches([micro_batch])))


def refusals(
    subject: Subject,
    programs: Sequence[Program],
    memory: int,
    on_cpu: bool = True,
    base_memory: int | None = None,
) -> list[str]:
    """Errors with which a server's engine with `memory` bytes refuses each program alone, with settings that
    would fit; empty where it accepts the program. Uses the engine itself on tensors without data. On a CPU
    code that libraries compile counts, too. With `base_memory` the base is streamed in as many bytes."""
    found = _admit(subject, programs, memory, on_cpu, base_memory)
    return [str(one) if isinstance(one, CoserveError) else "" for one in found]


def least_memories(subject: Subject, programs: Sequence[Program], base_memory: int) -> list[int]:
    """Bytes with which a server's engine on a CPU accepts each program alone, its base streamed in
    `base_memory`: what it has reserved once the program is admitted to more than enough. Raises ConfigError
    or OutOfMemory."""
    found = []
    for one in _admit(subject, programs, _NO_LIMIT, True, base_memory):
        if isinstance(one, CoserveError):
            raise one
        found.append(one)
    return found


def _admit(
    subject: Subject, programs: Sequence[Program], memory: int, on_cpu: bool, base_memory: int | None
) -> list[int | CoserveError]:
    """Admits each program, one after the other, to an engine with a cache of their size; returns the bytes
    that the engine has reserved, or its refusal."""
    if not programs:
        return []
    runs = [EngineRun(subject, program, torch.device("cpu")) for program in programs]
    with fake_tensors():
        try:
            engine = Engine(subject.build(), runs[0].config(memory, base_memory))
            if on_cpu:
                engine.memory.count_process(grown=0)  # nothing is loaded here
        except (ConfigError, OutOfMemory) as error:
            return [error] * len(programs)
        idle = engine.memory.ledger.used  # before a job has the base's weights unpacked for backward
        return [run.admit(engine) if run.trains else idle for run in runs]


def _held(engine: Engine) -> int:
    """Bytes that the session holds beside activations."""
    held = engine.executor.call(ReadMemory()).sessions[_JOB]
    return held[Account.OPTIMIZERS] + held[Account.ADAPTERS]


def _groups(micro_batches: Sequence[MicroBatch], size: int) -> Iterator[Sequence[MicroBatch]]:
    """Groups of at most `size` micro-batches, which are under way at the same time."""
    for start in range(0, len(micro_batches), size):
        yield micro_batches[start : start + size]
