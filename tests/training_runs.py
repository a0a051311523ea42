"""A job that a test drives by hand: its examples in optimizer steps, and its session on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from adapters import known
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.loaded import LoadedAdapters
from coserve.core.plan import BasePlan, Updated
from coserve.core.sequence import MicroBatch
from coserve.engine.engine import Engine
from coserve.engine.finetuning import Keeping
from coserve.errors import LossNotFinite
from coserve.memory.arena import Arena
from coserve.memory.ledger import Account
from coserve.model.base import Base
from coserve.schedule.segments import batch_start, training_segment
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.job import PreparedJob
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.session import TrainingSession
from coserve.train.state import TrainingState
from coserve.train.supervised import SupervisedSteps
from coserve.train.updating import update_all


class TrainingRun:
    """The part of `engine.training.Training` and a scheduler for one job, driven by a test. Attributes not
    defined here are the session's."""

    def __init__(
        self,
        base: Base,
        loaded: LoadedAdapters,
        job: str,
        start: AdapterVersion,
        examples: Sequence[Example],
        config: TrainingConfig,
        arena: Arena | None = None,
        digest: str = "",
        resume: TrainingState | None = None,
        make_offload: MakeOffload | None = None,
    ) -> None:
        if resume is not None:
            start = replace(resume.adapter, name=start.name, version=start.version)
        data = Prepared(tuple(examples), digest=digest)
        prepared = PreparedJob(job, start.name, data, (), config, start, resume=resume)
        self.supervised = SupervisedSteps(prepared, base)
        self.steps, identity = self.supervised.steps, self.supervised.identity
        self.session = TrainingSession(
            base, loaded, job, start, self.supervised.session, arena, identity, resume, make_offload
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    @property
    def nbytes(self) -> int:
        """Bytes of activations, master weights, gradients and optimizer state."""
        return int(self.session.held[Account.ACTIVATIONS] + self.session.held[Account.OPTIMIZERS])

    def state(self) -> TrainingState:
        """A copy of the state now."""
        return self.session.snapshot()()

    def next_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, which the session has begun."""
        made = self.supervised.next_step(keys)
        for micro_batch in made:
            self.session.begin(batch_start(micro_batch))
            micro_batch.told = True
        return made

    def update(self) -> Updated:
        """The optimizer's step. Raises LossNotFinite, with nothing changed."""
        self.session.weights.make_room()
        (found,) = update_all([(self.session, self.supervised.optim_step)])
        if isinstance(found, LossNotFinite):
            raise found
        self.supervised.ended(found)
        return found


def keep_states(states: list[TrainingState], every: int = 1) -> Keeping:
    """Has a job's states added to a list."""
    return Keeping(every, lambda snapshot: states.append(snapshot.read()))


def adopt(engine: Engine, run: TrainingRun) -> None:
    """Has the engine's executor train the run, as one that it had opened itself."""
    session = run.session
    engine.executor.worker.sessions[session.job] = session
    engine.adapters.bank.publish(known(session.weights.current))


def there_and_back(engine: Engine, batch: MicroBatch) -> None:
    """Runs a micro-batch forward and back, all its rows in one window each way."""
    while not batch.done:
        span = batch.next_span(batch.layers)
        engine.executor.run(
            BasePlan(training=(training_segment(batch, 0, batch.length, batch.direction, span),))
        )
        batch.advance(0, batch.length, span)
