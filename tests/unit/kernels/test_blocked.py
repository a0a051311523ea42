"""Attention over more queries than one block holds; in float32, so that any CPU tests it."""

import pytest
import torch

from coserve.kernels import blocked, reference
from coserve.kernels.attention import causal_mask
from coserve.memory.fake_tensors import fake_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("past", [0, 200])
@pytest.mark.parametrize("window", [None, 1, 150])
@pytest.mark.parametrize(("batch", "groups", "share"), [(1, 2, 2), (2, 1, 3)])
def test_blocks_add_up_to_the_whole(
    batch: int, groups: int, share: int, window: int | None, past: int
) -> None:
    """300 queries are two blocks and a part; outputs and all gradients within float32's rounding of the
    twin's in float64."""
    g = torch.Generator().manual_seed(past)
    queries, keys = 300, 300 + past
    assert queries > 2 * blocked._BLOCK and queries % blocked._BLOCK
    shapes = ((groups * share, queries, 8), (groups, keys, 8), (groups, keys, 6))
    own = [torch.randn(batch, *shape, generator=g).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in own]
    with torch.no_grad():
        got, lse = blocked.forward(*own, 0.3, window, with_lse=True)
    wanted = reference.attention(*exact, 0.3, causal_mask(queries, keys, window, CPU))
    weights = torch.randn(got.shape, generator=g)
    with torch.no_grad():
        gradients = blocked.backward(weights, *own, got, lse, 0.3, window)
    wanted_gradients = torch.autograd.grad(wanted, exact, weights.double())
    for one, other in zip((got, *gradients), (wanted, *wanted_gradients), strict=True):
        scale = other.detach().abs().max().clamp_min(1.0)
        assert float((one.detach().double() - other.detach()).abs().max() / scale) <= 1e-5


def test_a_block_looks_at_no_key_that_it_need_not() -> None:
    """Blocks start at the oldest key that their first row may see and end at their last row's own."""
    spans = [(rows.stop, seen.start, seen.stop) for rows, seen in blocked._blocks(300, 320, 50)]
    assert spans == [(128, 0, 148), (256, 99, 276), (300, 227, 320)]


def test_low_precision_gradients_are_gathered_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 queries, each a block, all look alike at the keys before them and owe the first one 1/i. Sums in
    bfloat16 stand still once they are some 300 times as large as what is added: at 4.7 of 7.0."""
    monkeypatch.setattr(blocked, "_BLOCK", 1)
    q, k, v = torch.ones(1, 1, 600, 1), torch.zeros(1, 1, 600, 1), torch.zeros(1, 1, 600, 1)
    v[0, 0, 0] = 1
    q, k, v = (t.bfloat16() for t in (q, k, v))
    out, lse = blocked.forward(q, k, v, 1.0, None, with_lse=True)
    _, dk, dv = blocked.backward(torch.ones_like(out), q, k, v, out, lse, 1.0, None)
    share = 1 / torch.arange(1, 601)
    assert float(dv[0, 0, 0]) == pytest.approx(float(share.sum()), rel=0.02)
    assert float(dk[0, 0, 0]) == pytest.approx(float((share * (1 - share)).sum()), rel=0.02)


def test_what_ran_on_tensors_fake_tensors_leaves_nothing_behind() -> None:
    """Planning and tracing run the same code: whatever it makes once must hold for tensors with data."""
    g = torch.Generator().manual_seed(0)
    queries = 21  # no other test has as many
    own = [torch.randn(1, 2, queries, 8, generator=g) for _ in range(3)]
    with fake_tensors():
        blocked.forward(*(torch.empty(1, 2, queries, 8) for _ in own), 0.3, None)
    with torch.no_grad():
        got, _ = blocked.forward(*own, 0.3, None)
    exact = [t.double() for t in own]
    wanted = reference.attention(*exact, 0.3, causal_mask(queries, queries, None, CPU))
    assert (got.double() - wanted).abs().max() <= 1e-5
