"""Loss against its plain twin and torch's autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.kernels import reference
from coserve.kernels.loss import cross_entropy

seeds = st.integers(0, 2**31)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 30),
    vocabulary=st.integers(2, 200),
    spread=st.sampled_from([0.1, 5.0, 80.0]),
    seed=seeds,
)
def test_cross_entropy_is_its_twin_and_autograd_s(
    rows: int, vocabulary: int, spread: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, vocabulary, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    untouched = logits.clone()
    loss, gradient = cross_entropy(logits, labels, 0.37)
    assert torch.equal(logits, untouched)
    twin_loss, twin_gradient = reference.cross_entropy(logits, labels)
    leaf = logits.clone().requires_grad_()
    own = F.cross_entropy(leaf, labels, reduction="sum")
    own.backward()
    for wanted_loss, wanted in ((twin_loss, twin_gradient), (own.detach(), leaf.grad)):
        assert torch.allclose(loss, wanted_loss, rtol=1e-12, atol=1e-12)
        assert torch.allclose(gradient, 0.37 * wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_in_low_precision_sums_in_float32(
    dtype: torch.dtype, tolerance: float, seed: int
) -> None:
    """The gradient rounds once, to the logits' type (8 bits in bfloat16); the loss is float32."""
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(20, 500, generator=g)).to(dtype)
    labels = torch.randint(0, 500, (20,), generator=g)
    loss, gradient = cross_entropy(logits, labels, 0.5)
    wanted_loss, wanted = reference.cross_entropy(logits.double(), labels)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    assert torch.allclose(gradient.double(), 0.5 * wanted, rtol=tolerance, atol=1e-6)


def test_the_loss_of_large_logits_is_finite() -> None:
    """exp(300) has no float32; the token that stands out costs nothing, its rival the distance."""
    logits = torch.tensor([[300.0, 0.0, -300.0], [0.0, 300.0, 299.0]])
    loss, gradient = cross_entropy(logits, torch.tensor([0, 2]), 1.0)
    assert float(loss) == pytest.approx(1.0 + math.log1p(math.exp(-1.0)), rel=1e-5)
    assert torch.allclose(gradient, torch.tensor([[0.0, 0, 0], [0, 0.7310586, -0.7310586]]), atol=1e-5)
