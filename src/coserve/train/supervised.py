"""Supervised fine-tuning as a client of a training session: examples in optimizer steps. No tensors."""

from collections.abc import Iterator, Sequence

from coserve.core.sequence import MicroBatch
from coserve.train.config import TrainingConfig
from coserve.train.example import Example
from coserve.train.packing import Packing
from coserve.train.steps import JobSteps, StepWork


class SupervisedSteps(JobSteps):
    """Steps of cross-entropy over the labels of `examples`: each is one work, with its optimizer step."""

    def __init__(
        self,
        adapter: str,
        examples: Sequence[Example],
        config: TrainingConfig,
        packing: Packing,
        digest: str = "",
        resumed_from: int = 0,
    ) -> None:
        super().__init__(adapter, [len(e) for e in examples], config, packing, digest, resumed_from)
        self.examples = examples

    def next_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, keyed from `keys`; none when training is over."""
        work = self.next_work(keys)
        return [] if work is None else [*work.micro_batches]

    def _work(self, keys: Iterator[int]) -> StepWork:
        return self._restarted(keys)

    def _restarted(self, keys: Iterator[int]) -> StepWork:
        chosen = [self.examples[i] for i in self._under_way]
        labels = sum(example.label_count for example in chosen)
        made = []
        for index, indices in enumerate(self._packing.pack([len(e) for e in chosen], self.config.rows)):
            batch = self._packing.micro_batch(next(keys), self.adapter, [chosen[i] for i in indices])
            batch.step_labels, batch.dropout_seed = labels, f"{self.config.seed}/{self.step}/{index}"
            made.append(batch)
        return StepWork(made, self.optim_step)
