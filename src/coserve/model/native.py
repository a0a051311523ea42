"""Has modules of a base compute by native kernels where these give what the modules give.

A module is recognised by experiment, not by name: the kernel and the module's own forward get the same
random input when a base is loaded. As elsewhere, only the bound `forward` of the module is replaced. Inside
`torch_only` the own forward runs.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.kernels.native import gradients, ops
from coserve.model.linear import FrozenLinear
from coserve.model.placement import Placed
from coserve.model.placing import Holds

_ROTARY: Final = "apply_rotary_pos_emb"  # the function that attention modules of many models call
_ROUNDING: Final = 2 * 2**-7  # relative; a sum in another order may round twice to a neighbour in bfloat16
_OFTEN: Final = 0.02  # share of numbers that may do so
_SCALES: Final = (1e-3, 1.0, 30.0)  # of a norm's input: in the first its epsilon matters


@torch.no_grad()
def use_native_kernels(model: PreTrainedModel, holds: Holds = lambda _: True) -> None:
    """Replaces the forward of norms, gated feed-forward layers and attention modules that are recognised, at
    paths that `holds` accepts; must come before sites are hooked. Does nothing for a base in another type
    than bfloat16 or without a compiler."""
    if not any(ops.takes(parameter) for parameter in model.parameters()):
        return
    rotary: dict[Callable[..., Any], FunctionType | None] = {}  # attention's forward, with another function
    for path, module in model.named_modules():
        if holds(path) and not isinstance(module, Placed):  # whose weight may be elsewhere
            _replace_norm(module) or _replace_gated(module) or _replace_rotary(module, rotary)


def _replace_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False
    if len([*module.parameters()]) != 1 or not ops.takes(weight):
        return False
    own = module.forward
    x = torch.cat([scale * (_random(4, len(weight)) + 0.5) for scale in _SCALES])[None]
    for centred in (False, True):
        if _same(own(x), ops.rms_norm(x, weight, eps, centred)):
            break
    else:
        return False

    def forward(x: Tensor) -> Any:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if ops.takes(x, weight):
            return ops.rms_norm(x, weight, eps, centred)
        if gradients.takes(x, weight) and not weight.requires_grad:
            return gradients.rms_norm(x, weight, eps, centred)
        return own(x)

    module.forward = forward
    return True


def _replace_gated(module: nn.Module) -> bool:
    gate, up, down = (getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down"))
    linears = (gate, up, down)
    if not all(isinstance(linear, FrozenLinear) for linear in linears) or [*module.parameters()]:
        return False
    assert gate is not None and up is not None and down is not None
    own = module.forward

    def native(x: Tensor) -> Any:
        return down(ops.silu_mul(gate(x), up(x)))

    x = _random(1, 5, gate.in_features)
    if not ops.takes(x) or not ops.takes(gate(x)) or not _same(own(x), native(x)):
        return False

    def forward(x: Tensor) -> Any:
        if ops.takes(x):
            return native(x)
        return down(gradients.silu_mul(gate(x), up(x))) if gradients.takes(x) else own(x)

    module.forward = forward
    return True


def _replace_rotary(module: nn.Module, known: dict[Callable[..., Any], FunctionType | None]) -> bool:
    """Gives a module the code of its own forward, in which the name of the rotary embedding is another
    function."""
    own = type(module).forward
    if not isinstance(own, FunctionType) or _ROTARY not in own.__code__.co_names:
        return False
    if own not in known:
        known[own] = None
        rotary = own.__globals__.get(_ROTARY)
        if rotary is not None and _rotates_halves(rotary):
            names = own.__globals__ | {_ROTARY: partial(_rotary, rotary)}
            copied = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
            copied.__kwdefaults__ = own.__kwdefaults__
            known[own] = copied
    copied_forward = known[own]
    if copied_forward is None or "forward" in module.__dict__:
        return False
    module.forward = MethodType(copied_forward, module)
    return True


def _rotary(
    own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> Any:
    is_plain = not args and not kwargs and cos.ndim == 3 and len(cos) == 1 and q.shape[-1] == cos.shape[-1]
    if is_plain and q.ndim == 4 and ops.takes(q, k, cos, sin):
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    if is_plain and q.ndim == 4 and gradients.takes(q, k, cos, sin):
        return gradients.rotate(q, cos, sin), gradients.rotate(k, cos, sin)
    return own(q, k, cos, sin, *args, **kwargs)


def _rotates_halves(rotary: Callable[..., Any]) -> bool:
    heads, groups, rows, width = 4, 2, 5, 16
    q, k = (_random(1, rows, n, width).transpose(1, 2) for n in (heads, groups))
    cos, sin = _random(1, rows, width), _random(1, rows, width)
    if not ops.takes(q, k):
        return False
    try:
        found_q, found_k = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments, or other shapes
        return False
    return torch.equal(found_q, ops.rotate(q, cos, sin)) and torch.equal(found_k, ops.rotate(k, cos, sin))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def _same(own: Any, native: Tensor) -> bool:
    """Tells whether results are equal, but for the rounding of a few numbers."""
    if not isinstance(own, Tensor) or own.shape != native.shape or own.dtype != native.dtype:
        return False
    near = torch.isclose(own, native, rtol=_ROUNDING, atol=0.0)
    return bool(near.all()) and float((own != native).float().mean()) <= _OFTEN
