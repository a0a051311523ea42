"""DPO on pairs that the policy itself has sampled: of several answers to a prompt the one with the highest
reward is preferred to the one with the lowest (Rafailov et al. 2023, section 4)."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.plan import Updated
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.train.config import TrainingConfig
from coserve.train.example import IGNORED, Example
from coserve.train.objectives import DPO
from coserve.train.pairs import TokenPair
from coserve.workload.requests import Tokens

Reward = Callable[[Sequence[int]], float]
_GROUP: Final = 8  # answers of which a pair is made
_RATE: Final = 1e-3


class Preferred:
    """An engine, and the pairs sampled in it: `rounds` for each prompt, of answers of `tokens` tokens."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Tokens], reward: Reward, tokens: int, rounds: int
    ) -> None:
        self._engine, self._prompts, self._reward, self._tokens = engine, prompts, reward, tokens
        self._seed = 0
        self.pairs = [pair for _ in range(rounds) for prompt in prompts if (pair := self._pair(prompt))]

    def train(self, adapter: str, epochs: int, batch_size: int) -> list[Updated]:
        """Trains an adapter on the pairs; returns its optimizer steps."""
        config = TrainingConfig(epochs=epochs, batch_size=batch_size, learning_rate=_RATE)
        lora = LoRAConfig(rank=16)
        return self._engine.finetune(self.pairs, adapter, lora, config, objective=DPO()).result().history

    def mean_reward(self, adapter: str | None) -> float:
        """The mean reward of a group of fresh answers to each prompt."""
        return fmean(
            self._reward(one.tokens) for prompt in self._prompts for one in self._sample(prompt, adapter)
        )

    def _pair(self, prompt: Tokens) -> TokenPair | None:
        """A pair, or None where all answers are rated alike."""
        rated = sorted(self._sample(prompt, None), key=lambda one: self._reward(one.tokens))
        worst, best = rated[0].tokens, rated[-1].tokens
        if self._reward(worst) == self._reward(best):
            return None
        return TokenPair(_answered(prompt, best), _answered(prompt, worst))

    def _sample(self, prompt: Tokens, adapter: str | None) -> list[Completion]:
        asked = []
        for _ in range(_GROUP):
            self._seed += 1
            params = SamplingParams(self._tokens, temperature=1.0, seed=self._seed)
            asked.append(self._engine.generate(prompt, adapter, params))
        return [one.result() for one in asked]


def _answered(prompt: Tokens, answer: Sequence[int]) -> Example:
    """Prompt and answer, of which the answer's tokens are learned."""
    return Example((*prompt, *answer), (*[IGNORED] * (len(prompt) - 1), *answer, IGNORED))
