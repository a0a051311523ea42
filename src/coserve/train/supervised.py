"""Supervised fine-tuning as a client of a training session: examples in optimizer steps. No tensors."""

from collections.abc import Iterator

from coserve.core.sequence import MicroBatch
from coserve.train.steps import JobSteps, StepWork


class SupervisedSteps(JobSteps):
    """Steps of cross-entropy over the labels of examples: each is one work, with its optimizer step."""

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
