"""Each loss and its gradient for log-probabilities, as float64 autograd finds them for its definition."""

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
    return -logprob


def importance_sampling(logprob: Tensor, of: Numbers) -> Tensor:
    return -torch.exp(logprob) / torch.exp(of["logprobs"]) * of["advantages"]


def ppo(logprob: Tensor, of: Numbers) -> Tensor:
    return -_clipped(torch.exp(logprob - of["logprobs"]), of["advantages"])


def cispo(logprob: Tensor, of: Numbers) -> Tensor:
    ratio = torch.exp(logprob - of["logprobs"]).detach().clamp(LOW, HIGH)
    return -ratio * of["advantages"] * logprob


def dro(logprob: Tensor, of: Numbers) -> Tensor:
    return -(of["advantages"] * logprob - 0.5 * 0.3 * (logprob - of["logprobs"]) ** 2)


def gspo(logprobs: Tensor, of: Numbers) -> Tensor:
    """Of a whole example."""
    mask = of["sequence_ratio_mask"]
    ratio = torch.exp(((logprobs - of["logprobs"]) * mask).sum() / mask.sum().clamp_min(1.0))
    return -torch.stack([_clipped(ratio, advantage) for advantage in of["advantages"]])


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


def weighted(
    definition: Callable[[Tensor, Numbers], Tensor], logprobs: Tensor, of: Numbers, weights: Tensor
) -> Tensor:
    """The losses of an example's tokens times their weights, those of weight 0 left out before anything is
    computed of them."""
    kept = weights.nonzero().squeeze(1)
    found = torch.zeros_like(logprobs)
    if len(kept):
        found[kept] = weights[kept] * definition(logprobs[kept], {key: x[kept] for key, x in of.items()})
    return found


def test_every_loss_has_its_definition_here() -> None:
    assert {*CASES, "dpo", "orpo"} == set(LOSSES), "those of pairs are in tests/equivalence"


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_definition(name: str) -> None:
    """Ratios are spread to both sides of both thresholds, and advantages and weights have both signs. Some
    weights are zero, and what else such a token has would give infinities."""
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
    if "desirable" in inputs:
        inputs["desirable"] = (examples % 2).double()
    weights = inputs.get("weights")
    if weights is not None:
        weights[torch.rand(len(examples)) < 0.3] = 0.0
        for key in {"logprobs", "advantages"} & set(inputs):
            inputs[key][weights == 0] = -1e30
    leaf = logprobs.clone().requires_grad_()
    parts = []
    for rows in torch.arange(len(examples)).split(lengths):
        of = {key: x[rows] for key, x in inputs.items()}
        if weights is None:
            parts.append(definition(leaf[rows], of)[None])
        else:
            parts.append(weighted(definition, leaf[rows], of, of.pop("weights")))
    each = torch.cat(parts)
    wanted = each.sum()
    (gradient,) = torch.autograd.grad(wanted, leaf)
    if weights is not None:
        values = LOSSES[name].token_values(logprobs, examples, inputs, settings)
        torch.testing.assert_close(values, each.detach(), rtol=_TOLERANCE, atol=1e-12)
    found = LOSSES[name].gradient(logprobs, examples, inputs, settings)
    torch.testing.assert_close(found, (wanted.detach(), gradient), rtol=_TOLERANCE, atol=1e-12)
    torch.testing.assert_close(LOSSES[name].value(logprobs, examples, inputs, settings), found[0])
