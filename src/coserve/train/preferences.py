"""Learning from pairs of answers (DPO, ORPO) as a client of a training session. No tensors.

A step is a pass over its pairs, and then its optimizer step alone. DPO has another pass before: the
reference's log-probabilities of the same rows, computed by the same kernels as training. They are kept for
later epochs; a resumed job computes those that it needs again.
"""

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from coserve.core.plan import MicroBatchOutput, Updated
from coserve.core.training import Datum
from coserve.train.client_pass import ClientPass, DataLimits
from coserve.train.config import TrainingConfig
from coserve.train.example import IGNORED, Example
from coserve.train.objectives import Preferences
from coserve.train.packing import Packing
from coserve.train.steps import JobSteps, StepWork

# The job's data were checked when they were read.
_UNLIMITED: Final = DataLimits(sys.maxsize, sys.maxsize, 0, sys.maxsize)
Logprobs = Sequence[float]


class PreferenceSteps(JobSteps):
    """Steps over pairs: example 2k is preferred to 2k + 1. `reference` packs micro-batches for the reference,
    which may have other virtual tokens than the adapter in training."""

    def __init__(
        self,
        objective: Preferences,
        adapter: str,
        examples: Sequence[Example],
        config: TrainingConfig,
        packing: Packing,
        reference: Packing,
        digest: str = "",
        resumed_from: int = 0,
    ) -> None:
        lengths = [len(one) + len(other) for one, other in zip(examples[::2], examples[1::2], strict=True)]
        super().__init__(adapter, lengths, config, packing, digest, resumed_from)
        self.examples, self._objective, self._reference_packing = examples, objective, reference
        self._reference: dict[int, array[float]] = {}  # log-probabilities of examples, by their index
        self._pass: ClientPass | None = None  # under way
        self._scores: tuple[Logprobs, ...] | None = None  # of the step's examples, once they have passed
        self._loss = 0.0  # their loss, summed over pairs
        self._passes = 0

    def passed(self, outputs: Mapping[int, MicroBatchOutput]) -> None:
        """See `JobSteps`."""
        assert self._pass is not None, "a pass is under way"
        if self._missing:
            found = self._pass.output(self._reference_packing, outputs)
            for i, logprobs in zip(self._missing, found.logprobs, strict=True):
                self._reference[i] = array("d", logprobs)
        else:
            found = self._pass.output(self._packing, outputs)
            self._scores, self._loss = found.logprobs, found.loss
        self._pass = None

    def ended(self, updated: Updated) -> Updated:
        """See `JobSteps`."""
        assert self._scores is not None, "the step's pairs have passed"
        pairs = len(self._under_way)
        self.loss, metrics = self._loss / pairs, self._metrics(self._scores)
        self._scores = None
        return replace(super().ended(updated), loss=self.loss, metrics=metrics)

    def _work(self, keys: Iterator[int]) -> StepWork:
        if self._scores is not None:
            return StepWork((), self.optim_step)
        self._passes += 1
        if missing := self._missing:
            data = [self._datum(i) for i in missing]
            self._pass = ClientPass(data, "cross_entropy", {}, False, _UNLIMITED)
            packing, is_reference = self._reference_packing, True
        else:
            data = [self._with_reference(i) for i in self._chosen]
            settings = {"beta": self._objective.beta}
            self._pass = ClientPass(data, self._objective.name, settings, True, _UNLIMITED)
            packing, is_reference = self._packing, False
        seed = self.config.seed
        made = self._pass.micro_batches(packing, self.adapter, self.config.rows, keys, self._passes, seed)
        for index, batch in enumerate(made):
            batch.step_labels, batch.reference = len(self._under_way), is_reference
            batch.dropout_seed = f"{seed}/{self.step}/{index}"  # as in an uninterrupted job
        return StepWork(made, None)

    def _restarted(self, keys: Iterator[int]) -> StepWork:
        self._scores = None
        return self._work(keys)

    @property
    def _chosen(self) -> list[int]:
        """Indices of the examples of the step under way, pair by pair."""
        return [i for pair in self._under_way for i in (2 * pair, 2 * pair + 1)]

    @property
    def _missing(self) -> list[int]:
        """The pairs whose log-probabilities under the reference are not known and are needed."""
        if not self._objective.has_reference:
            return []
        return [i for i in self._chosen if i not in self._reference]

    def _datum(self, index: int) -> Datum:
        example = self.examples[index]
        return Datum(example.tokens, example.labels)

    def _with_reference(self, index: int) -> Datum:
        datum = self._datum(index)
        if not self._objective.has_reference:
            return datum
        return replace(datum, inputs={"reference": tuple(self._reference[index])})

    def _metrics(self, scores: Sequence[Logprobs]) -> dict[str, float]:
        """Figures of the step's answers. What one has gained is its log-probability beyond the reference's
        for DPO, and its mean log-probability for ORPO."""
        gained = [self._gained(i, own) for i, own in zip(self._chosen, scores, strict=True)]
        return reward_metrics(self._objective.beta, gained)

    def _gained(self, index: int, logprobs: Logprobs) -> float:
        rows = [row for row, label in enumerate(self.examples[index].labels) if label != IGNORED]
        if not self._objective.has_reference:
            return fmean(logprobs[row] for row in rows)
        reference = self._reference[index]
        return sum(logprobs[row] - reference[row] for row in rows)


def reward_metrics(beta: float, gained: Sequence[float]) -> dict[str, float]:
    """Figures of the implicit rewards of pairs, in TRL's words: `beta` times what each answer has `gained`,
    the preferred one of a pair first."""
    chosen, rejected = ([beta * one for one in side] for side in (gained[::2], gained[1::2]))
    margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
    return {
        "rewards/chosen": fmean(chosen),
        "rewards/rejected": fmean(rejected),
        "rewards/accuracies": fmean(margin > 0.0 for margin in margins),
        "rewards/margins": fmean(margins),
    }
