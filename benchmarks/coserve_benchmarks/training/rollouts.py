"""GRPO on a training session of the engine: groups of answers to each prompt, advantages within the group,
one policy-gradient step on all of them (Shao et al. 2024, DeepSeekMath, 4.1, without a penalty on the
distance from a reference).

In turns a step samples and then trains. Together, the next batch is sampled by the weights from before the
step while the step trains this one: one step off policy, which importance sampling corrects. Answers have
the bounds of the tier `flex`, as those of reinforcement jobs: without bounds the default slowdown would be
kept for them, at the expense of the training that is waited for as well.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from coserve.core.request import SamplingParams
from coserve.core.training import AdamParams, Datum
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.grading import FLEX
from coserve.engine.training_client import Operation, TrainingClient
from coserve.workload.requests import Tokens

Reward = Callable[[Sequence[int]], float]
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one step: prompts, answers to each, and tokens of an answer."""

    prompts: int
    group: int
    answer: int


class Rollouts:
    """One policy in training. `reward` rates an answer's tokens."""

    def __init__(
        self,
        engine: Engine,
        session: TrainingClient,
        prompts: Sequence[Tokens],
        reward: Reward,
        sizes: Sizes,
        learning_rate: float,
        ends: bool = False,
    ) -> None:
        """With `ends` answers may end before they have all their tokens."""
        self.rewards: list[float] = []  # the mean of each batch that was trained on
        self._engine, self._session, self._prompts, self._reward = engine, session, prompts, reward
        self._sizes, self._ends = sizes, ends
        self._adam = AdamParams(learning_rate)
        self._batches = 0
        self._next: list[Completion] | None = None

    def in_turns(self) -> float:
        """A step that samples, and then trains; its seconds."""
        started = time.perf_counter()
        answers = self._sample()
        self._run(answers, [])
        self._run([], self._train(answers))
        return time.perf_counter() - started

    def together(self) -> float:
        """A step that trains on the batch sampled during the one before, and samples the next meanwhile; its
        seconds. The first batch is sampled before the clock starts."""
        if self._next is None:
            self._next = self._sample()
            self._run(self._next, [])
        started = time.perf_counter()
        following = self._sample()
        self._run(following, self._train(self._next))
        self._next = following
        return time.perf_counter() - started

    def _sample(self) -> list[Completion]:
        self._batches += 1
        answers = []
        for place, prompt in enumerate(self._prompts[: self._sizes.prompts]):
            for member in range(self._sizes.group):
                seed = (self._batches * self._sizes.prompts + place) * self._sizes.group + member
                params = SamplingParams(
                    self._sizes.answer, temperature=1.0, logprobs=0, seed=seed, ignore_eos=not self._ends
                )
                answers.append(self._engine.generate(prompt, self._session.adapter, params, FLEX))
        return answers

    def _train(self, answers: Sequence[Completion]) -> list[Operation[Any]]:
        data, earned = [], []
        for begin in range(0, len(answers), self._sizes.group):
            group = answers[begin : begin + self._sizes.group]
            scores = [self._reward(one.tokens) for one in group]
            spread = pstdev(scores) or 1.0
            data += [
                _datum(one, (score - fmean(scores)) / spread)
                for one, score in zip(group, scores, strict=True)
            ]
            earned += scores
        self.rewards.append(fmean(earned))
        passed = self._session.forward_backward(data, "importance_sampling")
        return [passed, self._session.optim_step(self._adam)]

    def _run(self, answers: Sequence[Completion], operations: Sequence[Operation[Any]]) -> None:
        """Steps the engine until all of these have ended. Raises the error of one that failed."""
        while not all(one.finish_reason is not None for one in answers) or not all(
            one.is_done for one in operations
        ):
            self._engine.step()
        for answer in answers:
            answer.result()
        for operation in operations:
            operation.result()


def _datum(answer: Completion, advantage: float) -> Datum:
    """A sampled answer, each of whose tokens has the answer's advantage; the prompt's are no targets."""
    prompt, tokens = answer.sequence.request.prompt, answer.tokens
    before = len(prompt) - 1
    return Datum(
        (*prompt, *tokens[:-1]),
        (*[_IGNORED] * before, *tokens),
        {
            "logprobs": (*[0.0] * before, *(one.chosen for one in answer.logprobs)),
            "advantages": (*[0.0] * before, *[advantage] * len(tokens)),
        },
    )
