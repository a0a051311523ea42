"""Frozen linears: what they compute, what they keep, what goes back through them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from coserve.model.batch import BatchCell
from coserve.model.linear import FrozenLinear, frozen
from coserve.model.load import load_base
from coserve.model.placement import PlainPlacement, place_locally
from models import tiny


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_placement(bias: bool, dtype: torch.dtype) -> None:
    weight, x, grad = (
        drawn(0, 7, 5, dtype=dtype),
        drawn(1, 2, 3, 5, dtype=dtype),
        drawn(2, 2, 3, 7, dtype=dtype),
    )
    offset = drawn(3, 7, dtype=dtype) if bias else None
    placement = place_locally(weight, offset)
    assert isinstance(placement, PlainPlacement)
    assert torch.equal(placement.forward(x), F.linear(x, weight, offset))
    assert torch.allclose(placement.backward(grad), torch.einsum("bro,oi->bri", grad, weight))
    assert torch.equal(placement.weight(), weight)
    assert placement.nbytes == weight.nbytes + (offset.nbytes if bias else 0)


@pytest.mark.parametrize("rows", [1, 2, 15, 64, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_is_bit_for_bit_torch_s_own(rows: int, bias: bool) -> None:
    """Forward exactly, the weight exactly, backward within bfloat16's rounding of sums in another order.

    Where the processor cannot pack, the placement is the plain one and the same must hold.
    """
    weight = drawn(rows, 96, 64, dtype=torch.bfloat16)
    offset = drawn(5, 96, dtype=torch.bfloat16) if bias else None
    x, grad = drawn(6, 1, rows, 64, dtype=torch.bfloat16), drawn(7, 1, rows, 96, dtype=torch.bfloat16)
    placement = place_locally(weight, offset)
    assert torch.equal(placement.forward(x), F.linear(x, weight, offset))
    assert torch.equal(placement.weight(), weight)
    before = placement.nbytes
    back = placement.backward(grad)
    assert back.dtype == torch.bfloat16
    exact = grad.double() @ weight.double()
    assert float((back.double() - exact).norm() / exact.norm()) < 4e-3
    assert placement.nbytes == before  # no second, transposed weight


def test_conv1d_is_transposed_into_place() -> None:
    conv = Conv1D(6, 4)
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.normal_(conv.bias)
    weight = conv.weight.data.t().contiguous()
    linear = FrozenLinear("c", place_locally(weight, conv.bias.data), (6, 4), BatchCell())
    x = torch.randn(3, 4)
    assert torch.allclose(linear(x), conv(x), atol=1e-6)
    assert linear.weight.shape == (6, 4)


def test_the_backward_needs_weights_only() -> None:
    """Autograd keeps neither input nor output of a frozen linear, and the gradient is the linear's own."""
    plain = nn.Linear(5, 7, dtype=torch.float64).requires_grad_(False)
    placement = place_locally(plain.weight.data, plain.bias.data)
    saved: list[torch.Tensor] = []
    x = drawn(1, 4, 5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = frozen(x, placement)
    assert not saved
    (got,) = torch.autograd.grad(y, x, grad := drawn(2, 4, 7))
    (wanted,) = torch.autograd.grad(plain(x), x, grad)
    assert torch.allclose(got, wanted, rtol=1e-12)


def test_a_kept_product_stands_for_the_forward() -> None:
    class Counting(PlainPlacement):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    placement = Counting(drawn(0, 7, 5), None)
    x = drawn(1, 4, 5).requires_grad_()
    kept = placement.forward(x.detach())
    y = frozen(x, placement, kept)
    assert placement.calls == 1 and torch.equal(y, kept) and y.requires_grad
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(got, torch.ones(4, 7, dtype=torch.float64) @ placement.weight())
    assert frozen(x.detach(), placement, kept) is kept


def test_only_exact_linears_are_replaced() -> None:
    """A subclass may behave otherwise (some routers do)."""
    from coserve.model.load import load_base
    from models import tiny

    class Router(nn.Linear):
        pass

    model = tiny("llama")
    layer = model.model.layers[0].mlp
    own = layer.gate_proj
    layer.gate_proj = Router(own.in_features, own.out_features, bias=False)
    base = load_base(model)
    assert type(base.model.model.layers[0].mlp.gate_proj) is Router
    assert "model.layers.0.mlp.gate_proj" not in base.sites
    site = base.sites["model.layers.1.mlp.gate_proj"]
    assert (site.outputs, site.inputs, site.stage) == (96, 64, 1)
    assert base.sites["lm_head"].stage == base.depth


def test_a_bias_is_read_without_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packed or quantized linear the dense weight takes as long to make as it is large."""
    base = load_base(tiny("gpt2"))
    path = next(path for path in base.linears if base.chain.part_of(path) is not base.chain.ends)

    def dense(*_: object) -> None:
        raise AssertionError("nobody asked for the weight")

    wanted = base.linears[path].placement.bias
    monkeypatch.setattr(type(base.linears[path].placement), "weight", dense)
    assert wanted is not None and base.frozen.bias(path) is wanted


@torch.no_grad()
def test_few_rows_read_a_weight_in_float32_where_it_lies_and_no_other_rows() -> None:
    """A kernel is given addresses: data that are replaced, and rows of another width or type, are noticed."""
    weight, x = torch.randn(64, 96), torch.randn(3, 96)
    placement = place_locally(weight, None)
    torch.testing.assert_close(placement.forward(x), F.linear(x, weight))
    weight.data = 2 * weight.data
    torch.testing.assert_close(placement.forward(x), F.linear(x, weight))
    assert placement.native is None or placement.native.address == weight.data_ptr()
    for other in (torch.randn(3, 64), x.bfloat16()):
        with pytest.raises(RuntimeError):
            placement.forward(other)
