"""Modules of a base that compute by compiled kernels, in a graph: their gradients are those of torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.kernels import elementwise
from coserve.kernels.native.build import library, torch_only
from coserve.model.load import load_base
from models import tiny

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

NEAR = 0.03  # 8 bits of each number, over a few operations
KERNELS = ("rms_norm", "rotate", "silu_mul")


def called_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that a graph has called so far."""
    called: set[str] = set()
    for kernel in KERNELS:
        own = getattr(elementwise, kernel)

        def noted(*args: Any, own: Any = own, kernel: str = kernel) -> Any:
            called.add(kernel)
            return own(*args)

        monkeypatch.setattr(elementwise, kernel, noted)
    return called


def modules(name: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of x [1, rows, hidden] of a model's first layer, by the kernel that each should call."""
    base = load_base(tiny(name, torch.bfloat16))
    model: Any = base.model
    layer = model.model.layers[0]
    own = layer.self_attn.forward.__self__._forward  # behind the hook of its site
    rotary = own.__func__.__globals__["apply_rotary_pos_emb"]

    def rotated(x: Tensor) -> Tensor:
        width = layer.self_attn.head_dim
        heads = x.repeat(1, 1, width).view(1, x.shape[1], -1, width).transpose(1, 2)
        q, k = rotary(heads, heads[:, :1], *model.model.rotary_emb(x, torch.arange(x.shape[1])[None]))
        return q + 2 * k

    return {"rms_norm": layer.input_layernorm, "silu_mul": layer.mlp, "rotate": rotated}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_gradients_are_the_same_with_kernels_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called, functions = called_kernels(monkeypatch), modules(name)
    called.clear()  # of the experiments at loading
    for kernel, function in functions.items():
        if (name, kernel) == ("gemma", "silu_mul"):  # its activation is another one
            continue
        x = torch.randn(1, 30, 64).bfloat16().requires_grad_()
        y = function(x)
        assert called == {kernel}
        grad = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, grad)
        called.clear()
        with torch_only():
            plain = function(x)
            (want,) = torch.autograd.grad(plain, x, grad)
        assert not called
        for one, other in ((y, plain), (got, want)):
            assert (one - other).double().norm() <= NEAR * other.double().norm()
