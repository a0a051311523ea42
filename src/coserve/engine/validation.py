"""Validation of a job's checkpoints, by its objective: losses of examples and pairs, rewards of answers."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.grading import FLEX
from coserve.engine.scoring import Asked, LossScoring, PairScoring, Requests, Scoring, Validation
from coserve.engine.served_job import ServedJob
from coserve.errors import CoserveError
from coserve.train.job import PreparedJob
from coserve.train.objectives import DPO, KTO, ORPO, Reinforcement

_ANSWERS_UNDER_WAY: Final = 4


def start_scoring(
    job: ServedJob, prepared: PreparedJob, version: str, look_again: Callable[[], None]
) -> Scoring | None:
    """Starts the validation of a job's adapter `version`, a key; None for a job without a validation file.
    `look_again` is called between two steps when work on another thread has ended."""
    if (validation := prepared.validation) is None:
        return None
    engine, examples = job.engine, validation.examples
    match prepared.objective:
        case Reinforcement() as objective:
            references = validation.references
            prompts = [example.tokens for example in examples]
            return RewardScoring(engine, version, prompts, references, objective, look_again)
        case DPO() | ORPO() | KTO() as objective:
            stored, desirable = prepared.validation_reference, validation.desirable
            reference = None if stored is None else stored.name
            return PairScoring(engine, version, examples, objective, reference, job.compared, desirable)
        case _:
            return LossScoring(engine, version, examples)


class RewardScoring(Scoring):
    """The mean reward of greedy answers to prompts. The answers have the bounds of the tier `flex`, as a
    reinforcement job's do; the grader runs on another thread."""

    def __init__(
        self,
        engine: Engine,
        version: str,
        prompts: Sequence[Sequence[int]],
        references: Sequence[Mapping[str, Any]],
        objective: Reinforcement,
        look_again: Callable[[], None],
    ) -> None:
        super().__init__(engine, version)
        self._references, self._look_again = references, look_again
        greedy = SamplingParams(objective.max_tokens, temperature=0.0, grammar=objective.grammar)
        asked = (Asked(number, prompt, greedy) for number, prompt in enumerate(prompts))
        self._requests = Requests(engine, version, asked, FLEX, _ANSWERS_UNDER_WAY)
        self._grading = engine.rollouts.grading(objective, f"validation of {version}")
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._error: CoserveError | None = None
        self.advance()

    def _advance(self) -> Validation | None:
        if self._error is not None:
            raise self._error
        self._grading.advance()
        for number, completion in self._requests.advance():
            self._grade(number, completion)
        if len(self._rewards) < len(self._references):
            return None
        self._grading.close()
        figures = {"reward": fmean(self._rewards), "completions/mean_length": fmean(self._lengths)}
        return Validation(None, figures)

    def _cancel(self) -> None:
        self._requests.cancel()
        self._grading.close()

    def _grade(self, number: int, completion: Completion) -> None:
        tokens = tuple(completion.tokens)
        self._lengths.append(len(tokens))
        what = "grading answers of the validation"
        self._grading.grade(what, [tokens], self._references[number], self._graded)

    def _graded(self, outcome: list[float] | CoserveError) -> None:
        if self._is_cancelled:
            return
        if isinstance(outcome, CoserveError):
            self._error = outcome
        else:
            self._rewards += outcome
        if self._error is not None or len(self._rewards) == len(self._references):
            self._look_again()
