"""The rare ends of the noise, and that it belongs to tokens, not to places in a sorted list."""

import math

import pytest
import torch

from coserve.core.request import SamplingParams
from coserve.model import noise
from coserve.model.sample import SamplingTable, sample


def test_the_smallest_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 53 bits set would round to 1 in float32 and give -inf: an only candidate would lose to those that
    were dropped."""
    monkeypatch.setattr(noise, "splitmix64", lambda x: torch.full_like(x, -1))
    zero = torch.zeros(1, dtype=torch.long)
    assert float(noise.gumbel(zero, zero, zero[:, None])) == pytest.approx(
        -math.log(24 * math.log(2)), rel=1e-5
    )


def test_a_token_keeps_its_noise_when_others_are_dropped() -> None:
    """A top-k that drops only what was never drawn anyway changes no draw."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).expand(300, -1).clone()
    logits[:, ::2] -= 100
    positions, slots = torch.arange(300), torch.zeros(300, dtype=torch.long)
    draws = []
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=20)):
        table = SamplingTable(1, 40)
        table.set(0, params, seed=3, prompt=[])
        draws.append(sample(logits, slots, positions, table))
    assert torch.equal(draws[0], draws[1]) and len(set(draws[0].tolist())) > 10
