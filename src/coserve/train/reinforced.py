"""Reinforcement learning (GRPO) as a client of a training session: graded answers in optimizer steps. No
tensors.

A step's answers come from outside (`offer`), in the order of `sample_next`, which runs ahead of training. A
step is a pass over them, and then its optimizer step alone.
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final

from coserve.core.plan import MicroBatchOutput, Updated
from coserve.core.training import Datum
from coserve.model.base import Base
from coserve.train.client_pass import ClientPass, DataLimits
from coserve.train.example import IGNORED
from coserve.train.job import PreparedJob
from coserve.train.objectives import Reinforcement, ScaleRewards
from coserve.train.steps import JobSteps, StepWork

_UNLIMITED: Final = DataLimits(sys.maxsize, sys.maxsize, 0, sys.maxsize)  # prompts were checked when read
_ADDED: Final = 1e-4  # to the deviation that advantages are divided by, as TRL adds it


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled answer: its tokens with the log-probability of each when it was sampled, and its reward."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The answers to one prompt."""

    prompt: tuple[int, ...]
    answers: tuple[SampledAnswer, ...]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the answers."""
        return [answer.reward for answer in self.answers]

    @property
    def teaches(self) -> bool:
        """Tells whether rewards differ: else all advantages are 0."""
        return len({*self.rewards}) > 1


def advantages_of(groups: Sequence[AnswerGroup], scale: ScaleRewards = "group") -> list[list[float]]:
    """Advantages of the answers of a step's groups, as `Reinforcement` has them."""
    every = [reward for group in groups for reward in group.rewards]
    found = []
    for group in groups:
        rewards = group.rewards
        mean, deviation = fmean(rewards), 1.0
        if scale != "none":
            deviation = stdev(rewards if scale == "group" else every) + _ADDED
        found.append([(reward - mean) / deviation if group.teaches else 0.0 for reward in rewards])
    return found


class ReinforcedSteps(JobSteps):
    """Steps over prompts, which are examples without labels."""

    def __init__(self, job: PreparedJob, base: Base) -> None:
        super().__init__(job, base)
        assert isinstance(job.objective, Reinforcement), "the objective of these steps"
        self.objective = job.objective
        self.sampled = self.step  # number of steps whose prompts have been handed out
        self._to_sample = self._order()
        self._offered: deque[list[AnswerGroup]] = deque()
        self._groups: list[AnswerGroup] = []  # of the step under way
        self._pass: ClientPass | None = None
        self._loss: float | None = None  # of the step's pass, once it has ended
        self._passes = 0

    def sample_next(self) -> tuple[int, ...]:
        """Prompts, by index, of the next step to be sampled; none when all have been."""
        if self.sampled >= self.steps:
            return ()
        self.sampled += 1
        return next(self._to_sample)

    def offer(self, groups: Sequence[AnswerGroup]) -> None:
        """Takes a step's answers, in the order of `sample_next`."""
        self._offered.append([*groups])

    def next_work(self, keys: Iterator[int]) -> StepWork | None:
        """See `JobSteps`; None also until the step's answers are there."""
        if not self._under_way:
            if not self._offered or self.is_over:
                return None
            self._groups, self._loss = self._offered.popleft(), None
        return super().next_work(keys)

    def passed(self, outputs: Mapping[int, MicroBatchOutput]) -> None:
        """See `JobSteps`."""
        assert self._pass is not None, "a pass is under way"
        self._loss = self._pass.output(self._packing, outputs).loss

    def ended(self, updated: Updated) -> Updated:
        """See `JobSteps`."""
        assert self._loss is not None and self._pass is not None, "the step's answers have passed"
        self.loss = self._loss / self._tokens
        metrics, self._pass = self._metrics, None
        return replace(super().ended(updated), loss=self.loss, metrics=metrics)

    def _work(self, keys: Iterator[int]) -> StepWork:
        if self._loss is not None:
            return StepWork((), self.optim_step)
        self._passes += 1
        (loss, settings), seed = self.objective.loss, self.config.seed
        self._pass = ClientPass(self._data(), loss, settings, True, _UNLIMITED)
        made = self._pass.micro_batches(
            self._packing, self.adapter, self.config.rows, keys, self._passes, seed
        )
        for index, batch in enumerate(made):
            batch.step_labels = self._tokens
            batch.dropout_seed = f"{seed}/{self.step}/{index}"
        return StepWork(made, None)

    def _restarted(self, keys: Iterator[int]) -> StepWork:
        self._loss = None
        return self._work(keys)

    def _data(self) -> list[Datum]:
        """The answers of groups that teach something; of a step without any, one answer, whose gradient is
        zero. The loss is divided by all tokens of the step, so advantages have what their `loss_type` divides
        by in place of these as a factor."""
        count = sum(len(group.answers) for group in self._groups)
        data = []
        for group, advantages in zip(
            self._groups, advantages_of(self._groups, self.objective.scale_rewards), strict=True
        ):
            for answer, advantage in zip(group.answers, advantages, strict=True):
                match self.objective.loss_type:
                    case "grpo":
                        factor = self._tokens / (count * max(len(answer.tokens), 1))
                    case "dr_grpo":
                        factor = self._tokens / (count * self.objective.max_tokens)
                    case _:
                        factor = 1.0
                if advantage:
                    data.append(_datum(group.prompt, answer, factor * advantage))
        return data or [_datum(self._groups[0].prompt, self._groups[0].answers[0], 0.0)]

    @property
    def _tokens(self) -> int:
        """Tokens of all answers of the step, at least one."""
        return max(1, sum(len(answer.tokens) for group in self._groups for answer in group.answers))

    @property
    def _metrics(self) -> dict[str, float]:
        """Figures of the step's answers, in TRL's words."""
        answers = [answer for group in self._groups for answer in group.answers]
        return {
            "reward": fmean(answer.reward for answer in answers),
            "reward_std": fmean(stdev(group.rewards) for group in self._groups),
            "frac_reward_zero_std": fmean(not group.teaches for group in self._groups),
            "completions/mean_length": fmean(len(answer.tokens) for answer in answers),
        }

    @property
    def _most_rows(self) -> int:
        config, prompt = self.config, self._packing.prompt
        lengths, size = sorted(self._lengths, reverse=True), self.objective.group_size
        step, longest = size * sum(lengths[: config.batch_size]), max(lengths, default=1)
        return self._packing.buckets.pad_rows(min(max(config.rows, longest + prompt), step + prompt))


def _datum(prompt: tuple[int, ...], answer: SampledAnswer, advantage: float) -> Datum:
    """Prompt and answer; each of the answer's tokens is predicted by the row before it."""
    before = len(prompt) - 1
    return Datum(
        (*prompt, *answer.tokens[:-1]),
        (*[IGNORED] * before, *answer.tokens),
        {
            "logprobs": (*[0.0] * before, *answer.logprobs),
            "advantages": (*[0.0] * before, *[advantage] * len(answer.tokens)),
        },
    )
