"""Optimizer steps of a job, as a client of a training session: what all objectives have in common. No
tensors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coserve.core.plan import AdamW, MicroBatchOutput, OptimStep, Updated
from coserve.core.sequence import MicroBatch
from coserve.model.base import Base
from coserve.train.config import TrainingConfig
from coserve.train.example import epochs, steps_per_epoch
from coserve.train.job import PreparedJob
from coserve.train.packing import Packing
from coserve.train.rates import LearningRate
from coserve.train.save_policy import SavePolicy
from coserve.train.session import SessionConfig
from coserve.train.state import Identity


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work that a job gives the scheduler at a time: micro-batches and the optimizer step that ends them.
    Without an `update` they are a pass; an update may come alone, after a pass."""

    micro_batches: Sequence[MicroBatch]
    update: OptimStep | None


class JobSteps(ABC):
    """Cuts a job's units (examples, pairs, prompts) into optimizer steps, and those into work.

    The units of step n depend on the job and n alone, so a job that resumes goes on exactly as one that was
    not interrupted. `adapter` is the version to train from. Micro-batches for reference are packed for the
    reference, which may have other virtual tokens than the adapter in training. Raises JobError where the
    job's saved state is of another job.
    """

    def __init__(self, job: PreparedJob, base: Base) -> None:
        config, resume = job.config, job.resume
        self.prepared, self.adapter = job, job.first.key
        self.examples = job.data.examples
        self.steps = count_steps(job.units, config)
        self.step = self._resumed_from = 0 if resume is None else resume.step  # number of ended steps
        self.loss: float | None = None  # of the last step, where it is not the session's mean over labels
        self.identity = Identity(job.data.digest, config.seed, config.batch_size, config.epochs)
        if resume is not None:
            self.identity.expect(resume.identity)
        self._lengths = job.lengths  # rows of units, with the answers that each may get
        self._packing = Packing.of(job.job, base, job.first.virtual)
        reference = None if job.reference is None else job.reference.virtual
        self._reference_packing = Packing.of(job.job, base, reference)
        self._rate = LearningRate(
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            warmup_ratio=0.0 if config.warmup_steps else config.warmup_ratio,
            total_steps=self.steps,
        )
        self._batches = self._order()
        self._under_way: tuple[int, ...] = ()  # units of the step under way

    def opened(self, version: str) -> None:
        """Notes that the job's session is open with `version` of its adapter, and has its saved state."""
        self.prepared, self.adapter = replace(self.prepared, resume=None), version

    def next_work(self, keys: Iterator[int]) -> StepWork | None:
        """The next work, with micro-batches keyed from `keys`; None when training is over, or while the job
        waits for something other than the scheduler."""
        if not self._under_way:
            if self.is_over:
                return None
            self._under_way = next(self._batches)
        return self._work(keys)

    def smaller_work(self, keys: Iterator[int]) -> StepWork:
        """Restarts the step under way with the same units. From now on micro-batches have half the rows, and
        keep layer inputs alone."""
        assert self._under_way, "no step is under way"
        config = replace(self.config, rows=max(1, self.config.rows // 2), keep=SavePolicy.INPUTS)
        self.prepared = replace(self.prepared, config=config)
        return self._restarted(keys)

    def passed(self, outputs: Mapping[int, MicroBatchOutput]) -> None:
        """Takes the outputs of a pass, by the keys of its micro-batches."""
        raise NotImplementedError(f"{type(self).__name__} has no passes")

    def ended(self, updated: Updated) -> Updated:
        """Records an optimizer step; returns its report with what the objective adds."""
        self.step += 1
        self.adapter = updated.version
        self._under_way = ()
        return updated

    @property
    def config(self) -> TrainingConfig:
        """The job's settings, at present."""
        return self.prepared.config

    @property
    def is_over(self) -> bool:
        """Tells whether all steps have ended."""
        return self.step >= self.steps

    @property
    def is_under_way(self) -> bool:
        """Tells whether an optimizer step has begun and has not ended."""
        return bool(self._under_way)

    @property
    def optim_step(self) -> OptimStep:
        """The optimizer step that ends the step under way."""
        config = self.config
        optimizer = AdamW(config.betas, config.epsilon, config.weight_decay)
        return OptimStep(self.prepared.job, self._rate.at(self.step), config.max_grad_norm, optimizer)

    @property
    def session(self) -> SessionConfig:
        """Settings of the job's session."""
        return SessionConfig(self.config.keep, self._most_rows)

    @property
    def _most_rows(self) -> int:
        """The most rows of any micro-batch of the job, padding included."""
        config, prompt = self.config, self._packing.prompt
        lengths = sorted(self._lengths, reverse=True)
        step, longest = sum(lengths[: config.batch_size]), max(lengths, default=1)
        return self._packing.buckets.pad_rows(min(max(config.rows, longest + prompt), step + prompt))

    def _order(self) -> Iterator[tuple[int, ...]]:
        """Units of each step still to come."""
        config = self.config
        return epochs(
            self.prepared.units, config.batch_size, config.epochs, config.seed, start=self._resumed_from
        )

    @abstractmethod
    def _work(self, keys: Iterator[int]) -> StepWork | None:
        """The next work of the step under way."""

    @abstractmethod
    def _restarted(self, keys: Iterator[int]) -> StepWork:
        """The first work of the step under way, again."""


def count_steps(units: int, config: TrainingConfig) -> int:
    """Optimizer steps of a job with so many examples, pairs or prompts."""
    steps = steps_per_epoch(units, config.batch_size) * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)
