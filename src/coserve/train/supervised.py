"""Supervised fine-tuning as a client of a training session: examples in optimizer steps. No tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from coserve.core.plan import AdamW, OptimStep
from coserve.core.row_buckets import RowBuckets
from coserve.core.sequence import MicroBatch
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, epochs, steps_per_epoch
from coserve.train.packing import Packing
from coserve.train.rates import LearningRate
from coserve.train.save_policy import SavePolicy
from coserve.train.session import SessionConfig
from coserve.train.state import Identity


class SupervisedSteps:
    """Cuts a job's examples into optimizer steps, and those into micro-batches.

    The examples of step n depend on `config` and n alone, so a job continues after `resumed_from` steps
    exactly as an uninterrupted one. `adapter` is the version to train from. `digest` is that of the examples,
    and may be empty if the job is never resumed. `prefix` and `prompt` count the adapter's virtual tokens:
    those given as keys and values, and those that pass through the model as rows. Micro-batches are padded to
    the device's `buckets`.
    """

    def __init__(
        self,
        job: str,
        adapter: str,
        examples: Sequence[Example],
        config: TrainingConfig,
        layers: int,
        buckets: RowBuckets,
        prefix: int = 0,
        prompt: int = 0,
        digest: str = "",
        resumed_from: int = 0,
    ) -> None:
        self.job, self.config, self.examples = job, config, examples
        self.adapter = adapter
        self.steps = count_steps(len(examples), config)
        self.step = resumed_from  # number of ended steps
        self.identity = Identity(digest, config.seed, config.batch_size, config.epochs)
        self._packing = Packing(job, layers, buckets, prefix, prompt)
        self._rate = LearningRate(
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            warmup_ratio=0.0 if config.warmup_steps else config.warmup_ratio,
            total_steps=self.steps,
        )
        self._batches = epochs(
            len(examples), config.batch_size, config.epochs, config.seed, start=resumed_from
        )
        self._under_way: list[Example] = []

    def next_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, keyed from `keys`; none when training is over."""
        if self.step >= self.steps:
            return []
        self._under_way = [self.examples[i] for i in next(self._batches)]
        return self._packed(keys)

    def smaller_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """Restarts the step under way with the same examples. From now on micro-batches have half the rows,
        and keep layer inputs alone."""
        assert self._under_way, "no step is under way"
        self.config = replace(self.config, rows=max(1, self.config.rows // 2), keep=SavePolicy.INPUTS)
        return self._packed(keys)

    def ended(self, adapter: str) -> None:
        """Records an optimizer step, which has published the version `adapter`."""
        self.step += 1
        self.adapter = adapter
        self._under_way = []

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
        lengths = sorted(map(len, self.examples), reverse=True)
        step, longest = sum(lengths[: config.batch_size]), max(lengths, default=1)
        return self._packing.buckets.pad_rows(min(max(config.rows, longest + prompt), step + prompt))

    def _packed(self, keys: Iterator[int]) -> list[MicroBatch]:
        chosen = self._under_way
        labels = sum(example.label_count for example in chosen)
        made = []
        for index, indices in enumerate(self._packing.pack([len(e) for e in chosen], self.config.rows)):
            batch = self._packing.micro_batch(next(keys), self.adapter, [chosen[i] for i in indices])
            batch.step_labels, batch.dropout_seed = labels, f"{self.config.seed}/{self.step}/{index}"
            made.append(batch)
        return made


def count_steps(examples: int, config: TrainingConfig) -> int:
    """Optimizer steps of a job with so many examples."""
    steps = steps_per_epoch(examples, config.batch_size) * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)
