"""Optimizer steps of a job, as a client of a training session: what all objectives have in common. No
tensors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coserve.core.plan import AdamW, MicroBatchOutput, OptimStep, Updated
from coserve.core.sequence import MicroBatch
from coserve.train.config import TrainingConfig
from coserve.train.example import epochs, steps_per_epoch
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

    The units of step n depend on `config` and n alone, so a job continues after `resumed_from` steps exactly
    as an uninterrupted one. `adapter` is the version to train from. `digest` is that of the data, and may be
    empty if the job is never resumed. `lengths` are the units' rows, with the answers that a unit may get.
    """

    def __init__(
        self,
        adapter: str,
        lengths: Sequence[int],
        config: TrainingConfig,
        packing: Packing,
        digest: str = "",
        resumed_from: int = 0,
    ) -> None:
        self.job, self.adapter, self.config = packing.job, adapter, config
        self.steps = count_steps(len(lengths), config)
        self.step = resumed_from  # number of ended steps
        self.loss: float | None = None  # of the last step, where it is not the session's mean over labels
        self.identity = Identity(digest, config.seed, config.batch_size, config.epochs)
        self._lengths, self._packing = lengths, packing
        self._rate = LearningRate(
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            warmup_ratio=0.0 if config.warmup_steps else config.warmup_ratio,
            total_steps=self.steps,
        )
        self._batches = epochs(
            len(lengths), config.batch_size, config.epochs, config.seed, start=resumed_from
        )
        self._under_way: tuple[int, ...] = ()  # units of the step under way

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
        self.config = replace(self.config, rows=max(1, self.config.rows // 2), keep=SavePolicy.INPUTS)
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
        return OptimStep(self.job, self._rate.at(self.step), config.max_grad_norm, optimizer)

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
