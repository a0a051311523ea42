"""Validation of an adapter version on examples or pairs.

Each example is a request that only scores its prompt (`max_tokens=0`). So validation is ordinary inference:
it shares steps with answers and training, respects other requests' latency bounds, and uses the given
version, whatever has been published since. A few examples are under way at a time, so that a long validation
file never takes all running slots.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch

from coserve.core.request import SLO, FinishReason, SamplingParams
from coserve.core.training import ACCURACY
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.errors import ValidationDataError
from coserve.train.example import IGNORED, Example
from coserve.train.losses import LOSSES
from coserve.train.objectives import KTO, ORPO, Preferences
from coserve.train.preferences import estimated_kl, kto_settings, labelled_metrics, reward_metrics

_UNDER_WAY: Final = 2
_SCORE: Final = SamplingParams(max_tokens=0, prompt_logprobs=0, ignore_eos=True)
_WITH_LIKELIEST: Final = replace(_SCORE, prompt_logprobs=1)  # of each row, for an accuracy


def check_lengths(engine: Engine, examples: Sequence[Example], virtual: int, answer: int = 0) -> None:
    """Raises ValidationDataError for an example too long for an adapter with `virtual` virtual tokens,
    together with `answer` tokens of an answer."""
    size = engine.config.page_size
    template = virtual % size > 0  # an adapter's page that sequences copy
    most = min(engine.base.max_positions, (engine.config.sequence_pages - template) * size) - virtual - answer
    for number, example in enumerate(examples, 1):
        if len(example) > most:
            raise ValidationDataError(
                f"validation example {number} has {len(example)} tokens; this engine can read {most} at once"
            )


@dataclass(frozen=True, slots=True)
class Validation:
    """Outcome of a validation: the mean loss, None where there is none, and further figures by name."""

    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """The number of which the best checkpoint has the lowest: the loss, or the negated reward."""
        return -self.metrics["reward"] if self.loss is None else self.loss


class Asked(NamedTuple):
    """A request of a validation: its number, the prompt, and how it is answered."""

    number: int
    prompt: Sequence[int]
    sampling: SamplingParams


class Requests:
    """Requests to one version of an adapter, a key or a name (None is the base), a few at a time."""

    def __init__(
        self,
        engine: Engine,
        version: str | None,
        asked: Iterable[Asked],
        slo: SLO = SLO(),
        at_once: int = _UNDER_WAY,
    ) -> None:
        self._engine, self._version, self._slo, self._at_once = engine, version, slo, at_once
        self._waiting = deque(asked)
        self._under_way: dict[int, Completion] = {}

    @property
    def are_over(self) -> bool:
        """Tells whether all have been answered."""
        return not self._waiting and not self._under_way

    def advance(self) -> Iterator[tuple[int, Completion]]:
        """The answers that have ended, with their numbers; asks for the next. Raises the error of one that
        failed."""
        ended = {n: one for n, one in self._under_way.items() if one.finish_reason is not None}
        for number, completion in ended.items():
            del self._under_way[number]
            if completion.error is not None:
                raise completion.error
        while self._waiting and len(self._under_way) < self._at_once:
            number, prompt, sampling = self._waiting.popleft()
            # Prompts that never repeat stay out of the prefix cache.
            self._under_way[number] = self._engine.generate(
                prompt, self._version, sampling, self._slo, text=False, scope=None
            )
        return iter(ended.items())

    def cancel(self) -> None:
        """Ends those under way; asks for no more."""
        self._waiting.clear()
        for completion in self._under_way.values():
            completion.cancel()


class Scoring(ABC):
    """Measures the adapter `version`, a key, on validation data. Advances between steps."""

    def __init__(self, engine: Engine, version: str) -> None:
        self.result: Validation | None = None  # None until all of it is known
        self._engine, self._version = engine, version
        self._is_cancelled = False
        engine.adapters.cache.acquire(version, self)

    def advance(self) -> bool:
        """Collects requests that have ended and submits the next; True once the result is known. Raises the
        error of a request that failed."""
        if self.result is None and not self._is_cancelled:
            self.result = self._advance()
            if self.result is not None:
                self._engine.adapters.cache.release(self._version, self)
        return self.result is not None

    def cancel(self) -> None:
        """Stops scoring; there is no result."""
        if self.result is None and not self._is_cancelled:
            self._is_cancelled = True
            self._cancel()
            self._engine.adapters.cache.release(self._version, self)

    @abstractmethod
    def _advance(self) -> Validation | None:
        """Goes on; returns the result once it is known."""

    @abstractmethod
    def _cancel(self) -> None:
        """Ends what is under way."""


class LossScoring(Scoring):
    """The mean loss per label of examples, and the share of labels that are the likeliest token."""

    def __init__(self, engine: Engine, version: str, examples: Sequence[Example]) -> None:
        super().__init__(engine, version)
        self._scores = _Scores(engine, version, examples, _WITH_LIKELIEST)
        self.advance()

    def _advance(self) -> Validation | None:
        scored = self._scores.advance()
        if scored is None:
            return None
        labels = sum(one.labels for one in scored)
        accuracy = sum(one.hits for one in scored) / labels
        return Validation(-sum(one.logprob for one in scored) / labels, {ACCURACY: accuracy})

    def _cancel(self) -> None:
        self._scores.cancel()


class PairScoring(Scoring):
    """The mean loss of pairs or, for KTO, of labelled answers, with the figures that training reports.

    `compared` are the log-probabilities of all answers under the reference, which the first validation of a
    job fills in. `reference` is that adapter's name, None for the base. `desirable` has a label for each
    labelled answer. For KTO the whole file is one batch, for which the divergence is estimated once.
    """

    def __init__(
        self,
        engine: Engine,
        version: str,
        examples: Sequence[Example],
        objective: Preferences | KTO,
        reference: str | None,
        compared: list[float],
        desirable: Sequence[bool] = (),
    ) -> None:
        super().__init__(engine, version)
        self._objective, self._compared, self._desirable = objective, compared, desirable
        self._own = _Scores(engine, version, examples)
        self._reference: _Scores | None = None
        if objective.has_reference and not compared:
            self._reference = _Scores(engine, reference, examples)
        self.advance()

    def _advance(self) -> Validation | None:
        if self._reference is not None:
            found = self._reference.advance()
            if found is None:
                return None
            self._compared[:] = [one.logprob for one in found]
            self._reference = None
        scored = self._own.advance()
        return None if scored is None else self._measured(scored)

    def _measured(self, scored: Sequence["_Score"]) -> Validation:
        """An example counts as one token: a pair's loss depends on sums or means over an answer."""
        objective, inputs = self._objective, {}
        if objective.has_reference:
            numbers = [one.logprob for one in scored]
            inputs["reference"] = torch.tensor(self._compared, dtype=torch.float64)
            gained = [own - before for own, before in zip(numbers, self._compared, strict=True)]
        else:
            numbers = gained = [one.logprob / one.labels for one in scored]
        if isinstance(objective, KTO):
            return self._labelled(objective, numbers[::2], gained)
        settings, places, pairs = {"beta": objective.beta}, [*range(len(numbers))], len(numbers) // 2
        if isinstance(objective, ORPO):
            inputs["answers"] = torch.ones(len(numbers), dtype=torch.float64)
            if objective.nll_on == "all":  # of the prompts, and of what an answer has beyond its mean
                rest = [one.whole - mean for one, mean in zip(scored[::2], numbers[::2], strict=True)]
                numbers, places = numbers + rest, places + places[::2]
                inputs["answers"] = torch.cat([inputs["answers"], torch.zeros(pairs, dtype=torch.float64)])
                settings["nll_weight"] = pairs / sum(one.tokens for one in scored[::2])
        logprobs = torch.tensor(numbers, dtype=torch.float64)
        loss = LOSSES[objective.name].value(logprobs, torch.tensor(places), inputs, settings)
        return Validation(float(loss) / pairs, reward_metrics(objective.beta, gained))

    def _labelled(self, objective: KTO, numbers: Sequence[float], gained: Sequence[float]) -> Validation:
        kl = estimated_kl(gained[1::2])
        compared, desirable = self._compared[::2], list(map(float, self._desirable))
        logprobs, reference, marks = torch.tensor([numbers, compared, desirable], dtype=torch.float64)
        loss = LOSSES[objective.name].value(
            logprobs,
            torch.arange(len(numbers)),
            {"reference": reference, "desirable": marks},
            kto_settings(objective, kl),
        )
        figures = labelled_metrics(objective.beta, kl, gained[::2], self._desirable)
        return Validation(float(loss) / len(numbers), figures)

    def _cancel(self) -> None:
        for scores in (self._own, self._reference):
            if scores is not None:
                scores.cancel()


class _Score(NamedTuple):
    """One example's summed log-probability of its labels, and their number; `whole` is that of all its tokens
    but the first, of which there are `tokens`. `hits` counts labels that are the likeliest token, where the
    likeliest are known."""

    logprob: float
    labels: int
    whole: float
    tokens: int
    hits: int


class _Scores:
    """Scores of examples under one version."""

    def __init__(
        self,
        engine: Engine,
        version: str | None,
        examples: Sequence[Example],
        sampling: SamplingParams = _SCORE,
    ) -> None:
        self._examples = examples
        asked = (Asked(number, example.tokens, sampling) for number, example in enumerate(examples))
        self._requests = Requests(engine, version, asked)
        self._found: dict[int, _Score] = {}

    def advance(self) -> list[_Score] | None:
        """Scores of all examples, in order, once all are known."""
        for number, completion in self._requests.advance():
            if completion.finish_reason is FinishReason.LENGTH:
                self._found[number] = self._score(self._examples[number], completion)
        if not self._requests.are_over:
            return None
        return [self._found[number] for number in range(len(self._examples))]

    def cancel(self) -> None:
        """Stops."""
        self._requests.cancel()

    def _score(self, example: Example, completion: Completion) -> _Score:
        """The log-probability of token i + 1 is that of the label of row i."""
        pairs = zip(example.labels[:-1], completion.prompt_logprobs, strict=True)
        labelled = [(label, logprobs) for label, logprobs in pairs if label != IGNORED]
        found = [logprobs.chosen for _, logprobs in labelled]
        hits = sum(label == logprobs.top[0][0] for label, logprobs in labelled if logprobs.top)
        every = [logprobs.chosen for logprobs in completion.prompt_logprobs]
        return _Score(sum(found), len(found), sum(every), len(every), hits)
