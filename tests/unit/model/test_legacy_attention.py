"""ALiBi as further numbers of queries and keys, beside a bias of each score."""

import pytest
import torch

from coserve.kernels import reference
from coserve.kernels.attention import causal_mask
from coserve.model.legacy_attention import MOST_POSITIONS, with_biases, with_distances


def test_widened_products_are_those_with_a_bias() -> None:
    """Attention of random rows at random positions that follow each other."""
    seed = int(torch.randint(1 << 30, ()))
    generator = torch.Generator().manual_seed(seed)
    heads, rows, width = 6, 20, 16
    start = int(torch.randint(MOST_POSITIONS - rows, (), generator=generator))
    q, k, v = torch.randn(3, 1, heads, rows, width, generator=generator, dtype=torch.float64)
    slopes = torch.rand(heads, generator=generator, dtype=torch.float64)
    positions = torch.arange(start, start + rows)[None]
    scale, allowed = width**-0.5, causal_mask(rows, rows, None, q.device)
    wider = with_distances(q, k, positions, slopes / scale)
    found = reference.attention(*wider, v, scale, allowed)
    scores = q @ k.transpose(2, 3) * scale + slopes[:, None, None] * torch.arange(rows)
    wanted = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9), seed


def test_a_bias_by_key_is_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, 5, 4, generator=generator)
    biases = torch.randn(3, 5, generator=generator)
    wider, keys = with_biases(q, k, biases)
    wanted = q @ k.transpose(2, 3) + biases[None, :, None]
    assert torch.allclose(wider @ keys.transpose(2, 3), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_distances_are_exact_at_far_positions(dtype: torch.dtype) -> None:
    """Beside queries and keys of zeros: each score is the slope, as rounded once, times the distance."""
    slopes = torch.tensor([0.84, 0.5, 0.0039])
    positions = torch.tensor([[0, 1, 127, 128, 300, 5000, MOST_POSITIONS - 2, MOST_POSITIONS - 1]])
    none = torch.zeros(1, 3, positions.shape[1], 4, dtype=dtype)
    q, k = with_distances(none, none, positions, slopes)
    assert q.dtype == k.dtype == dtype
    distance = positions[0][None, :] - positions[0][:, None]
    wanted = slopes.to(dtype).double()[:, None, None] * distance
    found = q[0].double() @ k[0].double().transpose(1, 2)
    assert torch.equal(found, wanted)
