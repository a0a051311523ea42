"""A low-rank bypass against its plain twin and torch's autograd."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.adapters.lowrank import LoRABypass
from coserve.kernels import reference


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    rank=st.integers(1, 9),
    inside=st.integers(1, 30),
    outside=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_a_bypass_is_its_twin(rows: int, rank: int, inside: int, outside: int, seed: int) -> None:
    """In place, out of place, and the gradients of all four tensors (float64: 1e-12)."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    own = [draw(rows, inside), draw(rows, outside), draw(rank, inside), draw(outside, rank)]
    twins = [t.clone().requires_grad_() for t in own]
    wanted = reference.lora(*twins, 0.7)
    in_place = own[1].clone()
    LoRABypass(own[2], own[3], 0.7).add_(own[0], in_place)
    leaves = [t.clone().requires_grad_() for t in own]
    out_of_place = LoRABypass(leaves[2], leaves[3], 0.7).add(leaves[0], leaves[1])
    assert torch.allclose(in_place, wanted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(out_of_place, wanted, rtol=1e-12, atol=1e-12)
    weights = draw(rows, outside)
    for got, twin in zip(
        torch.autograd.grad(out_of_place, leaves, weights),
        torch.autograd.grad(wanted, twins, weights),
        strict=True,
    ):
        assert torch.allclose(got, twin, rtol=1e-12, atol=1e-12)


def test_adding_in_place_reaches_a_slice_of_a_larger_batch() -> None:
    y = torch.zeros(6, 4)
    LoRABypass(torch.ones(1, 3), torch.ones(4, 1), 2.0).add_(torch.ones(2, 3), y[2:4])
    assert torch.equal(y, torch.tensor([0, 0, 6, 6, 0, 0.0])[:, None].expand(6, 4))
