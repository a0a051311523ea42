"""Learning from pairs of answers (DPO, ORPO), or from desirable and undesirable ones (KTO), as a client of a
training session. No tensors.

A step is a pass over its answers, and then its optimizer step alone. With a reference it has another pass
before: the reference's log-probabilities of the same rows, computed by the same kernels as training. They are
kept for later epochs; a resumed job computes those that it needs again. KTO has one more in between, without
a gradient, which estimates the divergence from the reference.
"""

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from coserve.core.plan import MicroBatchOutput, Updated
from coserve.core.training import Datum, PassOutput
from coserve.model.base import Base
from coserve.train.client_pass import ClientPass, DataLimits
from coserve.train.example import IGNORED, Example
from coserve.train.job import PreparedJob
from coserve.train.objectives import KTO, ORPO, Preferences
from coserve.train.steps import JobSteps, StepWork

# The job's data were checked when they were read.
_UNLIMITED: Final = DataLimits(sys.maxsize, sys.maxsize, 0, sys.maxsize)
Logprobs = Sequence[float]


class PreferenceSteps(JobSteps):
    """Steps over pairs: example 2k is preferred to 2k + 1."""

    def __init__(self, job: PreparedJob, base: Base) -> None:
        super().__init__(job, base)
        assert isinstance(job.objective, Preferences | KTO), "the objective of these steps"
        self._objective: Preferences | KTO = job.objective
        self._reference: dict[int, array[float]] = {}  # log-probabilities of examples, by their index
        self._pass: ClientPass | None = None  # under way
        self._scores: tuple[Logprobs, ...] | None = None  # of the learned examples, once they have passed
        self._loss = 0.0  # their loss, summed over pairs or answers
        self._passes = 0

    def passed(self, outputs: Mapping[int, MicroBatchOutput]) -> None:
        """See `JobSteps`."""
        assert self._pass is not None, "a pass is under way"
        if self._missing:
            found = self._pass.output(self._reference_packing, outputs)
            for i, logprobs in zip(self._missing, found.logprobs, strict=True):
                self._reference[i] = array("d", logprobs)
        else:
            self._take(self._pass.output(self._packing, outputs))
        self._pass = None

    def ended(self, updated: Updated) -> Updated:
        """See `JobSteps`."""
        assert self._scores is not None, "the step's answers have passed"
        self.loss, metrics = self._loss / len(self._under_way), self._metrics(self._scores)
        self._scores = None
        return replace(super().ended(updated), loss=self.loss, metrics=metrics)

    def _work(self, keys: Iterator[int]) -> StepWork:
        if self._scores is not None:
            return StepWork((), self.optim_step)
        if missing := self._missing:
            data = [self._datum(i) for i in missing]
            scored = ClientPass(data, "cross_entropy", {}, False, _UNLIMITED)
            return self._begin(scored, keys, is_reference=True)
        return self._begin(self._next_pass(), keys)

    def _next_pass(self) -> ClientPass:
        """The next pass of the adapter in training."""
        settings = {"beta": self._objective.beta}
        if isinstance(self._objective, ORPO) and self._objective.nll_on == "all":
            data = [self._with_prompt(i) for i in self._chosen]
            tokens = sum(label != IGNORED for datum in data[::2] for label in datum.targets)
            settings["nll_weight"] = len(self._under_way) / tokens
        else:
            data = [self._with_reference(i) for i in self._chosen]
        return ClientPass(data, self._objective.name, settings, True, _UNLIMITED)

    def _take(self, found: PassOutput) -> None:
        """Takes the outcome of a pass of the adapter in training."""
        self._scores, self._loss = found.logprobs, found.loss

    def _begin(self, begun: ClientPass, keys: Iterator[int], is_reference: bool = False) -> StepWork:
        self._passes += 1
        self._pass, seed = begun, self.config.seed
        packing = self._reference_packing if is_reference else self._packing
        made = begun.micro_batches(packing, self.adapter, self.config.rows, keys, self._passes, seed)
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

    def _with_prompt(self, index: int) -> Datum:
        """An example of which, where it is preferred, all tokens have labels; `answers` marks its own."""
        example = self.examples[index]
        answers = tuple(float(label != IGNORED) for label in example.labels)
        labels = whole_labels(example) if index % 2 == 0 else example.labels
        return Datum(example.tokens, labels, {"answers": answers})

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
        """Beyond the reference, if there is one."""
        rows = [row for row, label in enumerate(self.examples[index].labels) if label != IGNORED]
        if not self._objective.has_reference:
            return fmean(logprobs[row] for row in rows)
        reference = self._reference[index]
        return sum(logprobs[row] - reference[row] for row in rows)


class LabelledSteps(PreferenceSteps):
    """Steps of KTO over answers: example 2k is the answer to be learned, and 2k + 1 its prompt with another
    answer. The data tell of each answer whether it is desirable, and so to become likelier."""

    def __init__(self, job: PreparedJob, base: Base) -> None:
        super().__init__(job, base)
        assert isinstance(job.objective, KTO), "the objective of these steps"
        self._kto, self._desirable = job.objective, job.data.desirable
        self._kl: float | None = None  # the step's estimate of the divergence from the reference

    def ended(self, updated: Updated) -> Updated:
        """See `JobSteps`."""
        told = super().ended(updated)
        self._kl = None
        return told

    def _restarted(self, keys: Iterator[int]) -> StepWork:
        self._kl = None
        return super()._restarted(keys)

    def _next_pass(self) -> ClientPass:
        if self._kl is None:
            data = [self._datum(i) for i in self._chosen[1::2]]
            return ClientPass(data, "cross_entropy", {}, False, _UNLIMITED)
        data = [self._labelled(i) for i in self._chosen[::2]]
        settings = kto_settings(self._kto, self._kl)
        return ClientPass(data, self._kto.name, settings, True, _UNLIMITED)

    def _take(self, found: PassOutput) -> None:
        if self._kl is None:
            pairs = zip(self._chosen[1::2], found.logprobs, strict=True)
            self._kl = estimated_kl([self._gained(i, logprobs) for i, logprobs in pairs])
        else:
            super()._take(found)

    def _labelled(self, index: int) -> Datum:
        datum, desirable = self._with_reference(index), float(self._desirable[index // 2])
        return replace(datum, inputs={**datum.inputs, "desirable": (desirable,) * len(datum.tokens)})

    def _metrics(self, scores: Sequence[Logprobs]) -> dict[str, float]:
        assert self._kl is not None, "the answers have passed with it"
        gained = [self._gained(i, own) for i, own in zip(self._chosen[::2], scores, strict=True)]
        desirable = [self._desirable[i] for i in self._under_way]
        return labelled_metrics(self._kto.beta, self._kl, gained, desirable)


def whole_labels(example: Example) -> tuple[int, ...]:
    """Labels of all tokens of an example, the prompt's too: each row has its own, or the next token."""
    following = zip(example.labels, (*example.tokens[1:], IGNORED), strict=True)
    return tuple(token if label == IGNORED else label for label, token in following)


def estimated_kl(gained: Sequence[float]) -> float:
    """KTO's estimate of the divergence from the reference, never negative: the mean of what answers to other
    prompts have `gained` in log-probability."""
    return max(fmean(gained), 0.0)


def kto_settings(objective: KTO, kl: float) -> dict[str, float]:
    """Settings of the loss `kto`."""
    return {
        "beta": objective.beta,
        "kl": kl,
        "desirable_weight": objective.desirable_weight,
        "undesirable_weight": objective.undesirable_weight,
    }


def labelled_metrics(
    beta: float, kl: float, gained: Sequence[float], desirable: Sequence[bool]
) -> dict[str, float]:
    """Figures of desirable and undesirable answers, in TRL's words, for `beta` times what each has `gained`;
    those of a kind that is not there are left out."""
    found = {"kl": kl}
    for name, wanted in (("rewards/chosen", True), ("rewards/rejected", False)):
        if rewards := [beta * one for one, is_one in zip(gained, desirable, strict=True) if is_one is wanted]:
            found[name] = fmean(rewards)
    if len(found) == 3:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


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
