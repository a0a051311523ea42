"""The state of a server's job in the engine's process: its data and settings, its handle, checkpoints."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from coserve.core.job_status import JobStatus
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.engine.grading import FLEX
from coserve.engine.scoring import Asked, LossScoring, PairScoring, Requests, Scoring, Validation
from coserve.errors import CoserveError
from coserve.train.checkpoint import Checkpoint
from coserve.train.job import PreparedJob
from coserve.train.objectives import DPO, KTO, ORPO, Reinforcement
from coserve.wire.messages import JobEnded, JobSpec

_ANSWERS_UNDER_WAY: Final = 4


class BestCheckpoint:
    """Follows the validation losses of one job.

    `known` are those of earlier checkpoints, by step; a job that goes on from step n measures later ones
    again. Without a `patience` the job is never stopped.
    """

    def __init__(
        self, patience: int | None = None, threshold: float = 0.0, known: Mapping[int, float] | None = None
    ) -> None:
        self._patience, self._threshold = patience, threshold
        self._losses = dict(known or {})

    def resume(self, step: int) -> None:
        """Forgets checkpoints after `step`, from which the job goes on."""
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}

    def take(self, step: int, loss: float) -> None:
        """Adds the loss of a checkpoint, or replaces it."""
        self._losses[step] = loss

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best checkpoint, the earliest of equal ones; None while there is none."""
        finite = [(loss, step) for step, loss in self._losses.items() if math.isfinite(loss)]
        loss, step = min(finite, default=(math.nan, 0))
        return (step, loss) if finite else None

    @property
    def without_gain(self) -> int:
        """Validations since the last one that counts as lower than all before."""
        lowest, count = math.inf, 0
        for _, loss in sorted(self._losses.items()):
            # Comparisons with NaN are false: it is never lower.
            count = 0 if lowest - loss > self._threshold else count + 1
            lowest = loss if loss < lowest else lowest
        return count

    @property
    def is_hopeless(self) -> bool:
        """Tells whether more validations than the patience allows brought no gain."""
        return self._patience is not None and self.without_gain >= self._patience


@dataclass(slots=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is not reported yet."""

    scoring: Scoring | None
    written: Checkpoint | None = None

    @property
    def is_complete(self) -> bool:
        return self.written is not None and (self.scoring is None or self.scoring.result is not None)


@dataclass(slots=True, eq=False)
class ServedJob:
    """A job, the engine of its base, and those of its events that are reported.

    `handle` is set once it trains or waits for bytes (`waits`). `noted` is the number of its notes that are
    reported; `starved` tells whether its starvation is. `best` follows its validation where that decides
    which checkpoint is the result; `compared` are the log-probabilities under what validation compares with,
    once they are known. `ending` is its last event, reported after its checkpoints; `again`
    restarts it after that.
    """

    spec: JobSpec
    engine: Engine
    last: float  # time of its last step, on the engine's clock
    best: BestCheckpoint | None = None
    prepared: PreparedJob | None = None
    compared: list[float] = field(default_factory=list)
    handle: FineTuning | None = None
    waits: bool = False
    noted: int = 0
    starved: bool = False
    step: int = 0
    kept: int = 0  # the newest step whose state was passed on to be written
    pending: deque[PendingCheckpoint] = field(default_factory=deque)
    stop: JobStatus | None = None  # stop requested while its data was read
    ending: JobEnded | None = None
    again: JobSpec | None = None


def leave_unscored(job: ServedJob) -> None:
    """Stops scoring a job's checkpoints, so that they are reported as soon as they are written."""
    for pending in job.pending:
        if pending.scoring is not None:
            pending.scoring.cancel()
            pending.scoring = None


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
