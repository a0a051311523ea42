"""Each loss and its gradient for log-probabilities, as float64 autograd finds them for its definition."""

import math
import secrets
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from coserve.train.losses import LOSSES

Numbers = Mapping[str, Tensor]
LOW, HIGH = 0.7, 1.3
_TOLERANCE = 1e-12  # relative; the same sums in another order


def _clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return torch.min(ratio * advantage, torch.clamp(ratio, LOW, HIGH) * advantage)


def cross_entropy(logprob: Tensor, of: Numbers) -> Tensor:
    return -of["weights"] * logprob


def importance_sampling(logprob: Tensor, of: Numbers) -> Tensor:
    return -torch.exp(logprob) / torch.exp(of["logprobs"]) * of["advantages"]


def ppo(logprob: Tensor, of: Numbers) -> Tensor:
    return -_clipped(torch.exp(logprob - of["logprobs"]), of["advantages"])


def cispo(logprob: Tensor, of: Numbers) -> Tensor:
    ratio = min(max(math.exp(float(logprob) - float(of["logprobs"])), LOW), HIGH)
    return -ratio * of["advantages"] * logprob


def dro(logprob: Tensor, of: Numbers) -> Tensor:
    return -(of["advantages"] * logprob - 0.5 * 0.3 * (logprob - of["logprobs"]) ** 2)


def gspo(logprobs: Tensor, of: Numbers) -> Tensor:
    """Of a whole example."""
    mask = of["sequence_ratio_mask"]
    ratio = torch.exp(((logprobs - of["logprobs"]) * mask).sum() / mask.sum())
    return -torch.stack([_clipped(ratio, advantage) for advantage in of["advantages"]]).sum()


def kto(logprobs: Tensor, of: Numbers) -> Tensor:
    """Of a whole example."""
    gain = (logprobs - of["reference"]).sum()
    if of["desirable"][0]:
        return 1.5 * (1 - torch.sigmoid(0.4 * (gain - 0.3)))
    return 0.5 * (1 - torch.sigmoid(0.4 * (0.3 - gain)))


CLIP = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
CASES: dict[str, tuple[Callable[[Tensor, Numbers], Tensor], Mapping[str, float]]] = {
    "cross_entropy": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, CLIP),
    "cispo": (cispo, CLIP),
    "dro": (dro, {"beta": 0.3}),
    "gspo": (gspo, CLIP),
    "kto": (kto, {"beta": 0.4, "kl": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
}


def test_an_example_without_a_label_adds_nothing() -> None:
    """A gap among the examples' numbers: their loss alone is not that of an answer that gains nothing."""
    logprobs, loss = torch.tensor([-1.0, -2.0], dtype=torch.float64), LOSSES["kto"]
    inputs = {"reference": torch.zeros_like(logprobs), "desirable": torch.ones_like(logprobs)}
    found = [loss.value(logprobs, torch.tensor(numbers), inputs, {}) for numbers in ([0, 1], [0, 3])]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_every_loss_has_its_definition_here() -> None:
    assert {*CASES, "dpo", "orpo"} == set(LOSSES), "those of pairs are in tests/equivalence"


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_definition(name: str) -> None:
    """Ratios are spread to both sides of both thresholds, and advantages have both signs."""
    torch.manual_seed(secrets.randbits(32))
    definition, settings = CASES[name]
    lengths = torch.randint(1, 12, (5,)).tolist()
    examples = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    logprobs = -torch.rand(len(examples), dtype=torch.float64) * 6
    inputs = {wanted: torch.randn(len(examples), dtype=torch.float64) for wanted in LOSSES[name].inputs}
    if "logprobs" in inputs:
        inputs["logprobs"] = logprobs + inputs["logprobs"]
    if "sequence_ratio_mask" in inputs:
        inputs["sequence_ratio_mask"] = torch.ones_like(logprobs) * (torch.rand(len(examples)) < 0.7)
        inputs["sequence_ratio_mask"][[0, *torch.tensor(lengths).cumsum(0)[:-1].tolist()]] = 1.0
    if "desirable" in inputs:
        inputs["desirable"] = (examples % 2).double()
    leaf = logprobs.clone().requires_grad_()
    if LOSSES[name].couples:
        parts = [
            definition(leaf[rows], {key: x[rows] for key, x in inputs.items()})
            for rows in torch.arange(len(examples)).split(lengths)
        ]
    else:
        parts = [
            definition(leaf[row], {key: x[row] for key, x in inputs.items()}) for row in range(len(leaf))
        ]
    wanted = torch.stack(parts).sum()
    (gradient,) = torch.autograd.grad(wanted, leaf)
    found = LOSSES[name].gradient(logprobs, examples, inputs, settings)
    torch.testing.assert_close(found, (wanted.detach(), gradient), rtol=_TOLERANCE, atol=1e-12)
    torch.testing.assert_close(LOSSES[name].value(logprobs, examples, inputs, settings), found[0])
