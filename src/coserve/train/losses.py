"""Losses: functions of the log-probabilities of target tokens, and of per-token inputs.

A loss never sees logits or hidden states. It receives the log-probability of each labelled row's target, and
autograd computes its gradient for these; `train.tail` does the rest. To add a loss, write its function and
name it in `LOSSES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.core.sequence import LossSpec
from coserve.errors import ConfigError

Numbers = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loss:
    """`function(logprobs, examples, inputs, settings)` returns the sum [] of the loss over n tokens.

    logprobs [n]; examples [n], the index of each token's example in the micro-batch; `inputs`, each [n], are
    those named in `inputs`, and `settings` those in `settings`, with their defaults. Where the loss `couples`
    tokens, n is the whole micro-batch and the tail is passed twice; else it may be any part of it.
    """

    function: Callable[[Tensor, Tensor, Numbers, Settings], Tensor]
    inputs: tuple[str, ...] = ()
    settings: Mapping[str, float] | None = None
    couples: bool = False

    def value(self, logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
        """The loss []."""
        return self.function(logprobs, examples, inputs, {**(self.settings or {}), **settings})

    def gradient(
        self, logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        """(loss [], its gradient for logprobs [n])."""
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.value(leaf, examples, inputs, settings)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient


def _cross_entropy(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    return -(inputs["weights"] * logprobs).sum()


def _dpo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7). Example 2k is preferred to 2k + 1;
    `reference` are log-probabilities under the model that training starts from."""
    pairs = int(examples.max()) // 2 + 1
    gained = logprobs.new_zeros(2 * pairs).index_add(0, examples, logprobs - inputs["reference"])
    return -F.logsigmoid(settings["beta"] * (gained[0::2] - gained[1::2])).sum()


LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, inputs=("weights",)),
    "dpo": Loss(_dpo, inputs=("reference",), settings={"beta": 0.1}, couples=True),
}


def loss_spec(
    name: str, inputs: Mapping[str, tuple[float, ...]] | None = None, **settings: float
) -> LossSpec:
    """A loss in the form of plans. `inputs` are one number for each row of the micro-batch. Raises
    ConfigError for unknown or missing inputs and settings."""
    inputs = inputs or {}
    if (loss := LOSSES.get(name)) is None:
        raise ConfigError(f"there is no loss {name!r}, only {', '.join(LOSSES)}")
    if name == "cross_entropy" and not inputs:  # every label has weight one
        return LossSpec()
    if set(inputs) != set(loss.inputs):
        raise ConfigError(f"the loss {name!r} needs {', '.join(loss.inputs)} for each token")
    if unknown := set(settings) - set(loss.settings or {}):
        raise ConfigError(f"the loss {name!r} has no setting {', '.join(sorted(unknown))}")
    return LossSpec(name, dict(inputs), settings, loss.couples)
