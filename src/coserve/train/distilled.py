"""Distillation as a client of a training session: what a teacher predicts at the labels of examples. No
tensors.

A step has two parts. The teacher's pass goes forward only, by the same kernels as training, and its output
are the likeliest tokens at each label with their log-probabilities. The micro-batches of the step then have
these as candidates of their loss. They are kept for later epochs as far as memory is set aside; a resumed job
computes those that it needs again.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum
from typing import Final

from coserve.core.plan import MicroBatchOutput, Updated
from coserve.core.sequence import MicroBatch
from coserve.model.base import Base
from coserve.train.example import IGNORED
from coserve.train.job import PreparedJob
from coserve.train.losses import distillation_spec
from coserve.train.objectives import Distillation
from coserve.train.steps import JobSteps, StepWork

_MOST_KEPT: Final = 1 << 26  # bytes of what the teacher predicts: 350,000 labels with 16 tokens each


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The teacher's likeliest tokens at the labels of one example, k for each, with log-probabilities."""

    tokens: "array[int]"
    logprobs: "array[float]"

    @property
    def nbytes(self) -> int:
        return self.tokens.itemsize * len(self.tokens) + self.logprobs.itemsize * len(self.logprobs)


class DistilledSteps(JobSteps):
    """Steps over examples. The teacher is the job's reference."""

    def __init__(self, job: PreparedJob, base: Base) -> None:
        super().__init__(job, base)
        assert isinstance(job.objective, Distillation), "the objective of these steps"
        self._objective = job.objective
        self._predicted: dict[int, _Prediction] = {}  # by the example's index
        self._nbytes = 0  # of these
        self._teaching: dict[int, list[int]] = {}  # examples of each micro-batch of the teacher's, by its key
        self._passes = 0

    def passed(self, outputs: Mapping[int, MicroBatchOutput]) -> None:
        """See `JobSteps`."""
        k = self._objective.top_k
        for key, indices in self._teaching.items():
            output, begin = outputs[key], 0
            for i in indices:
                end = begin + k * self.examples[i].label_count
                found = _Prediction(
                    array("i", output.top_tokens[begin:end]), array("d", output.top_logprobs[begin:end])
                )
                self._predicted[i], begin = found, end
                self._nbytes += found.nbytes
        self._teaching = {}

    def ended(self, updated: Updated) -> Updated:
        """See `JobSteps`. The teacher's share of probability that the step's tokens have is reported."""
        k, step = self._objective.top_k, [self._predicted[i] for i in self._under_way]
        mass = fsum(exp(logprob) for one in step for logprob in one.logprobs)
        labels = sum(len(one.tokens) for one in step) // k
        if self._nbytes > _MOST_KEPT:
            self._forget(self._under_way)
        metrics = {**updated.metrics, "teacher/top_k_mass": mass / labels}
        return replace(super().ended(updated), metrics=metrics)

    def _forget(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._nbytes -= self._predicted.pop(i).nbytes

    def _work(self, keys: Iterator[int]) -> StepWork:
        self._passes += 1
        if missing := [i for i in self._under_way if i not in self._predicted]:
            return StepWork(self._teacher_pass(missing, keys), None)
        return StepWork(self._student_pass(keys), self.optim_step)

    def _restarted(self, keys: Iterator[int]) -> StepWork:
        return self._work(keys)

    def _teacher_pass(self, indices: Sequence[int], keys: Iterator[int]) -> list[MicroBatch]:
        made, packing = [], self._reference_packing
        self._teaching = {}
        for places in packing.pack([len(self.examples[i]) for i in indices], self.config.rows):
            chosen = [indices[place] for place in places]
            batch = packing.micro_batch(next(keys), self.adapter, [self.examples[i] for i in chosen])
            batch.forward_only = batch.reports = batch.reference = True
            batch.top_k, batch.pass_number = self._objective.top_k, self._passes
            self._teaching[batch.key] = chosen
            made.append(batch)
        return made

    def _student_pass(self, keys: Iterator[int]) -> list[MicroBatch]:
        made, units = [], self._under_way
        labels = sum(self.examples[i].label_count for i in units)
        packs = self._packing.pack([len(self.examples[i]) for i in units], self.config.rows)
        for index, places in enumerate(packs):
            chosen = [units[place] for place in places]
            batch = self._packing.micro_batch(next(keys), self.adapter, [self.examples[i] for i in chosen])
            batch.loss = distillation_spec(*self._candidates(batch, chosen), self._objective.temperature)
            batch.step_labels, batch.pass_number = labels, self._passes
            batch.dropout_seed = f"{self.config.seed}/{self.step}/{index}"  # as in an uninterrupted job
            made.append(batch)
        return made

    def _candidates(self, batch: MicroBatch, indices: Sequence[int]) -> tuple[list[int], list[float]]:
        """The teacher's tokens and their log-probabilities, k for each row; zeros where there is no label."""
        k = self._objective.top_k
        tokens: list[int] = []
        logprobs: list[float] = []
        predictions, at = iter([self._predicted[i] for i in indices]), 0
        found = _Prediction(array("i"), array("d"))
        for label in batch.labels:
            if label == IGNORED:
                tokens += [0] * k
                logprobs += [0.0] * k
                continue
            if at == len(found.tokens):
                found, at = next(predictions), 0
            tokens += found.tokens[at : at + k]
            logprobs += found.logprobs[at : at + k]
            at += k
        return tokens, logprobs

    @property
    def _most_rows(self) -> int:
        """See `JobSteps`; the teacher's prompts may have more rows."""
        own = super()._most_rows
        return own + max(self._reference_packing.prompt - self._packing.prompt, 0)
