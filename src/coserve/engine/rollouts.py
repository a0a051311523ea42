"""Rollouts of reinforcement jobs: answers to their prompts, sampled as requests of the same engine, and
graded.

While a step trains, the answers of the next one are sampled, so sampling and training share steps. Each
answer has the log-probabilities of the version that sampled it, at most one step behind; the loss corrects
for that. Rollouts have the bounds of the tier `flex`, use a share of the running sequences, and make way for
all other requests that wait.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coserve.core.contained import contained
from coserve.core.events import JobFailed
from coserve.core.request import SamplingParams
from coserve.engine.aside import Aside, AtOnce
from coserve.engine.completion import Completion
from coserve.engine.grading import FLEX, AnswerGrading, Generate
from coserve.errors import CoserveError, JobError
from coserve.text import Text
from coserve.train.objectives import Reinforcement
from coserve.train.reinforced import AnswerGroup, ReinforcedSteps, SampledAnswer

SCOPE: Final = "rollouts of "
_AHEAD: Final = 1  # steps
_SHARE: Final = 4  # rollouts of all jobs have one in so many of the sequences that may run at once


@dataclass(slots=True, eq=False)
class _Sampling:
    """The answers of one step of a job: those to be asked for, under way, and done (by their number)."""

    indices: tuple[int, ...]  # of its prompts
    waiting: deque[tuple[int, tuple[int, ...], SamplingParams]]
    under_way: dict[int, Completion] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    graded: dict[int, AnswerGroup] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Job:
    steps: ReinforcedSteps
    grading: AnswerGrading
    ready: Callable[[], None]
    sampling: _Sampling | None = None
    error: CoserveError | None = None  # the reason for which its answers cannot be had


class Rollouts:
    """The rollouts of all reinforcement jobs of one engine. All methods run between two steps.

    `text` decodes answers for graders. `asides` makes the `Aside` on which each job's grader runs.
    """

    def __init__(
        self, generate: Generate, text: Text | None, waits: Callable[[], bool], max_running: int
    ) -> None:
        """`waits` tells whether other requests wait for room."""
        self.asides: Callable[[], Aside] = AtOnce
        self._generate, self._text, self._waits = generate, text, waits
        self._most = max(1, max_running // _SHARE)
        self._jobs: dict[str, _Job] = {}

    def start(self, steps: ReinforcedSteps, ready: Callable[[], None]) -> None:
        """Samples for a job from now on. `ready` is called when a step's answers are offered to
        `steps`."""
        name = steps.prepared.job
        grading = self.grading(steps.objective, f"{SCOPE}{name}")
        job = self._jobs[name] = _Job(steps, grading, ready)
        self._sample(job)

    def grading(self, objective: Reinforcement, scope: str) -> AnswerGrading:
        """Grades answers as an objective says, on threads of its own."""
        return AnswerGrading(objective.grader, self._generate, self._text, self.asides(), scope)

    def drop(self, name: str) -> None:
        """Ends a job's rollouts, if it has any."""
        job = self._jobs.pop(name, None)
        if job is None:
            return
        job.grading.close()
        if job.sampling is not None:
            for completion in job.sampling.under_way.values():
                completion.cancel()

    @property
    def has_work(self) -> bool:
        """Tells whether a job has failed, which the next `advance` returns."""
        return any(job.error is not None for job in self._jobs.values())

    def advance(self) -> list[JobFailed]:
        """Collects answers that have ended, has whole groups graded, and asks for further answers. Returns
        the jobs for which that has failed."""
        for name, job in list(self._jobs.items()):
            try:
                self._advance(job)
            except BaseException as error:
                job.error = contained(error, f"job {name}", JobError)
        failed = {name: job.error for name, job in self._jobs.items() if job.error is not None}
        for name in failed:
            self.drop(name)
        return [JobFailed(name, error) for name, error in failed.items()]

    def _advance(self, job: _Job) -> None:
        sampling, size = job.sampling, job.steps.objective.group_size
        job.grading.advance()
        if sampling is None:
            self._sample(job)
            return
        ended = [n for n, completion in sampling.under_way.items() if completion.finish_reason is not None]
        for number in ended:
            completion = sampling.done[number] = sampling.under_way.pop(number)
            if completion.error is not None:
                raise completion.error
        for group in sorted({number // size for number in ended}):
            members = range(group * size, group * size + size)
            if all(number in sampling.done for number in members):
                self._grade(job, sampling, group, [sampling.done[number] for number in members])
        if job.sampling is sampling:
            self._ask(job, sampling)

    def _sample(self, job: _Job) -> None:
        """Begins to sample the job's next step: at most one ahead of the one that trains."""
        steps, objective = job.steps, job.steps.objective
        if steps.sampled > steps.step + _AHEAD or not (indices := steps.sample_next()):
            return
        number = steps.sampled - 1
        size, waiting = objective.group_size, deque[tuple[int, tuple[int, ...], SamplingParams]]()
        for place, index in enumerate(indices):
            for member in range(size):
                params = SamplingParams(
                    max_tokens=objective.max_tokens,
                    temperature=objective.temperature,
                    seed=_seed(steps.config.seed, number, place, member),
                    logprobs=0,
                    grammar=objective.grammar,
                )
                waiting.append((place * size + member, steps.examples[index].tokens, params))
        job.sampling = _Sampling(indices, waiting)
        self._ask(job, job.sampling)

    def _ask(self, job: _Job, sampling: _Sampling) -> None:
        """Asks for as many answers as there is room for, and for at least one, so that the job goes on."""
        under_way = sum(len(one.sampling.under_way) for one in self._jobs.values() if one.sampling)
        while sampling.waiting and (under_way < self._most or not sampling.under_way):
            if sampling.under_way and self._waits():
                return
            number, prompt, params = sampling.waiting.popleft()
            prepared = job.steps.prepared
            scope = f"{SCOPE}{prepared.job}"  # no prefix in common with tenants' requests
            sampling.under_way[number] = self._generate(
                prompt, prepared.adapter, params, FLEX, text=False, scope=scope
            )
            under_way += 1

    def _grade(self, job: _Job, sampling: _Sampling, group: int, answers: Sequence[Completion]) -> None:
        """Grades the answers to one prompt aside."""
        prompt = answers[0].sequence.request.prompt
        tokens = [tuple(answer.tokens) for answer in answers]
        logprobs = [tuple(token.chosen for token in answer.logprobs) for answer in answers]
        reference = job.steps.prepared.data.references[sampling.indices[group]]

        def graded(outcome: list[float] | CoserveError) -> None:
            if self._jobs.get(job.steps.prepared.job) is not job:  # it has ended
                return
            if isinstance(outcome, CoserveError):
                job.error = outcome
                return
            made = zip(tokens, logprobs, outcome, strict=True)
            sampling.graded[group] = AnswerGroup(prompt, tuple(SampledAnswer(*one) for one in made))
            if len(sampling.graded) == len(sampling.indices):
                job.steps.offer([sampling.graded[n] for n in range(len(sampling.indices))])
                job.sampling = None
                self._sample(job)  # before the answers train: its first version is still the same
                job.ready()

        job.grading.grade("grading answers", tokens, reference, graded)


def _seed(*parts: int) -> int:
    """A seed of its own for each answer of a job, the same whenever the answer is sampled again."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest())
