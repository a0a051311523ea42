"""Modules of a base that compute by compiled kernels: which are recognised, and what they give."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coserve.kernels.native import ops
from coserve.kernels.native.build import library, torch_only
from coserve.model.load import load_base
from coserve.model.native import use_native_kernels
from coserve.model.probe import ProbeRows, drive
from models import tiny

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

RECOGNISED = {  # of the first layer: by model, the modules whose forward is another
    "llama": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "qwen3": {"self_attn", "self_attn.q_norm", "mlp", "input_layernorm"},
    "gemma": {"self_attn", "input_layernorm"},  # its activation is another one
}


def replaced(model: Any) -> set[str]:
    """Modules of the first layer whose forward is no longer that of their class."""
    layer = model.model.layers[0]
    return {path for path, module in layer.named_modules() if "forward" in module.__dict__}


@pytest.mark.parametrize("name", RECOGNISED)
def test_modules_that_kernels_compute_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []

    def noted(model: Any, *part: Any, **more: Any) -> None:
        use_native_kernels(model, *part, **more)
        found.append(replaced(model))

    monkeypatch.setattr("coserve.model.load.use_native_kernels", noted)
    load_base(tiny(name, torch.bfloat16))
    assert found[0] >= RECOGNISED[name]
    if name == "gemma":
        assert "mlp" not in found[0]


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_base_gives_the_same_with_kernels_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(tiny(name, torch.bfloat16))
    tokens = torch.randint(0, base.vocabulary, (40,))
    positions = torch.arange(40)
    called: list[str] = []
    for kernel in ("rms_norm", "rotate", "silu_mul"):
        own = getattr(ops, kernel)
        monkeypatch.setattr(
            ops, kernel, lambda *args, own=own, kernel=kernel: called.append(kernel) or own(*args)
        )
    got = drive(base, [ProbeRows(40)], tokens, positions).double()
    assert {*called} >= {"rms_norm", "rotate"}
    called.clear()
    with torch_only():
        plain = drive(base, [ProbeRows(40)], tokens, positions).double()
    assert not called
    assert (got - plain).norm() <= 0.03 * plain.norm()  # 8 bits of each number, over a few layers


def test_other_types_are_left_alone() -> None:
    model = tiny("llama", torch.float64)
    use_native_kernels(model)
    assert not replaced(model)


class _Halved(nn.Module):
    """A norm that looks like Llama's, and gives half of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) / 2
        return self.weight * scaled.to(x.dtype)


def test_a_module_that_gives_something_else_is_left_alone() -> None:
    model: Any = tiny("llama", torch.bfloat16)
    layer = model.model.layers[0]
    layer.input_layernorm = _Halved(len(layer.input_layernorm.weight))
    layer.post_attention_layernorm.variance_epsilon = 1e-2
    use_native_kernels(model)
    assert "input_layernorm" not in replaced(model)
    assert "post_attention_layernorm" in replaced(model)
