"""Has modules of a base compute by the kernels of its device where these give what the modules give.

A module is recognised by experiment, not by name: the kernel and the module's own forward get the same
random input when a base is loaded. As elsewhere, only the bound `forward` of the module is replaced, by a
method: a copy of the module then calls its own. Inside `torch_only` the own forward runs.
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.kernels import elementwise
from coserve.kernels.native import ops, recurrent
from coserve.model.placement import Placed
from coserve.model.placing import Holds

_GATED: Final = ("gate_proj", "up_proj", "down_proj")
_ROTARY: Final = "apply_rotary_pos_emb"  # the function that attention modules of many models call
# Relative difference by type: a sum in another order may round twice to a neighbour; and the share of numbers
# that may do so, in float32 any.
_ROUNDING: Final = {torch.bfloat16: 2 * 2**-7, torch.float16: 2 * 2**-10, torch.float32: 1e-5}
_OFTEN: Final = {torch.bfloat16: 0.02, torch.float16: 0.05, torch.float32: 1.0}
_SCALES: Final = (1e-3, 1.0, 30.0)  # of a norm's input: in the first its epsilon matters


@torch.no_grad()
def use_native_kernels(model: PreTrainedModel, holds: Holds = lambda _: True, float32: bool = True) -> None:
    """Replaces the forward of norms, gated feed-forward layers and attention modules that are recognised, at
    paths that `holds` accepts; must come before sites are hooked. Does nothing for a base in a type that the
    device's kernels do not read, or where there are none; or without `float32` for one in that type."""
    like = next(filter(elementwise.takes, model.parameters()), None)
    if like is None or (like.dtype is torch.float32 and not float32):
        return
    rotary: dict[Callable[..., Any], FunctionType | None] = {}  # attention's forward, with another function
    for path, module in model.named_modules():
        if holds(path) and not isinstance(module, Placed):  # whose weight may be elsewhere
            found = _replace_gated_norm(module) or _replace_norm(module) or replace_gated(module, like)
            found or _replace_rotary(module, like, rotary)


def _replace_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False
    if len([*module.parameters()]) != 1 or not elementwise.takes(weight):
        return False
    own = _function_of(module)
    x = torch.cat([scale * (_random(weight, 4, len(weight)) + 0.5) for scale in _SCALES])[None]
    try:
        found = own(module, x)
    except (TypeError, AttributeError, ValueError):  # a norm with a gate, or one that is given heads
        return False
    for centred in (False, True):
        if _same(found, elementwise.rms_norm(x, weight, eps, centred)):
            break
    else:
        return False

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        assert isinstance(weight, Tensor)
        if _is_plain(args, kwargs) and elementwise.takes(args[0], weight) and not weight.requires_grad:
            return elementwise.rms_norm(args[0], weight, eps, centred)
        return own(self, *args, **kwargs)

    module.forward = MethodType(forward, module)
    return True


def _replace_gated_norm(module: nn.Module) -> bool:
    """Has the norm of a recurrent layer, which is given a gate beside its input, computed in C."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False
    if len([*module.parameters()]) != 1 or not ops.takes(weight):
        return False
    own, width = _function_of(module), len(weight)
    groups = width // getattr(module, "group_size", width)
    x = torch.cat([scale * (_random(weight, 4, width) + 0.5) for scale in _SCALES])
    gate = 4.0 * _random(weight, len(x), width).flip(0)  # silu of less than -87 is 0 here
    try:
        found = own(module, x, gate)
    except TypeError:  # a norm without a gate
        return False
    for first in (False, True):
        if _same(found, recurrent.rms_norm_gated(x, gate, weight, groups, eps, first)):
            break
    else:
        return False

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        assert isinstance(weight, Tensor)
        if len(args) == 2 and not kwargs and recurrent.takes_gated(args[0], args[1], weight):
            return recurrent.rms_norm_gated(*args, weight, groups, eps, first)
        return own(self, *args, **kwargs)

    module.forward = MethodType(forward, module)
    return True


def replace_gated(
    module: nn.Module,
    like: Tensor,
    silu_mul: Callable[[Tensor, Tensor], Tensor] | None = None,
    takes: Callable[[Tensor], bool] | None = None,
) -> bool:
    """Has a gated feed-forward layer compute silu(gate) * up by `silu_mul`, for inputs that it `takes`; by
    the device's kernels where they are None. Tells whether it does so: not where the layer computes something
    else from the type of `like`. Its linears are not called, so adapters may be around them."""
    product = silu_mul or (lambda gate, up: elementwise.silu_mul(gate, up))
    is_taken = takes or (lambda x: elementwise.takes(x))
    if not all(isinstance(module._modules.get(name), nn.Module) for name in _GATED):
        return False
    bound = module.forward
    tried = bound.__func__ if isinstance(bound, MethodType) else getattr(bound, "own", None)  # a span's
    if [*module.parameters(recurse=False)] or _is_watched(module) or tried is None:
        return False
    gate, up, down = linears = [_NotedLinear(scale) for scale in (1.3, -0.7, 0.4)]
    trial = copy(module)
    trial.__dict__["_modules"] = module._modules | dict(zip(_GATED, linears, strict=True))
    try:
        found = tried(trial, _random(like, 1, 5, 16))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # other arguments, or more of its linears
        return False
    if any(len(linear.calls) != 1 for linear in linears) or found is not down.calls[0][1]:
        return False
    sides = gate.calls[0][1], up.calls[0][1]
    if not is_taken(sides[0]) or not _same(down.calls[0][0], product(*sides)):
        return False
    own = _function_of(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_plain(args, kwargs) or not is_taken(args[0]) or _is_watched(self):
            return own(self, *args, **kwargs)
        linears: Any = self  # which may be others by now, such as adapters' around them
        return linears.down_proj(product(linears.gate_proj(args[0]), linears.up_proj(args[0])))

    module.forward = MethodType(forward, module)
    return True


class _NotedLinear(nn.Module):
    """Stands for a linear in a trial, and notes what it was given and gave."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.calls: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((x, self._scale * x + 0.1))
        return self.calls[-1][1]


def _is_watched(gated: nn.Module) -> bool:
    """Tells whether a script has a hook at the activation between a gated layer's linears."""
    return any(
        child._forward_hooks or child._forward_pre_hooks
        for name, child in gated.named_children()
        if name not in _GATED
    )


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether a module is called as in its trial: with one tensor, no gate or the like beside it."""
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor)


def _function_of(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of the module and its arguments."""
    bound = module.forward
    if isinstance(bound, MethodType):
        return bound.__func__
    return lambda _, *args, **kwargs: bound(*args, **kwargs)


def _replace_rotary(
    module: nn.Module, like: Tensor, known: dict[Callable[..., Any], FunctionType | None]
) -> bool:
    """Gives a module the code of its own forward, in which the name of the rotary embedding is another
    function."""
    own = type(module).forward
    if not isinstance(own, FunctionType) or _ROTARY not in own.__code__.co_names:
        return False
    if own not in known:
        known[own] = None
        rotary = own.__globals__.get(_ROTARY)
        if rotary is not None and _rotates_halves(rotary, like):
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
    is_plain = not args and not kwargs and cos.ndim == 3 and q.ndim == 4 and q.shape[-1] == cos.shape[-1]
    if not is_plain or not elementwise.takes(q, k, cos, sin):
        return own(q, k, cos, sin, *args, **kwargs)
    if len(q) == len(cos) == 1:
        return elementwise.rotate(q, cos, sin), elementwise.rotate(k, cos, sin)
    tables = [_as_one(x.expand(len(q), -1, -1)) for x in (cos, sin)]
    return tuple(_rotated(x, *tables) for x in (q, k))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, rows, width], by tables [1, batch * rows, width]."""
    batch, heads, rows, width = x.shape
    found = elementwise.rotate(_as_one(x.transpose(1, 2)).transpose(1, 2), cos, sin)
    return found.transpose(1, 2).reshape(batch, rows, heads, width).transpose(1, 2)


def _as_one(x: Tensor) -> Tensor:
    """Sequences of a batch one after the other, as one: [batch, rows, ...] to [1, batch * rows, ...]."""
    return x.flatten(0, 1)[None]


def _rotates_halves(rotary: Callable[..., Any], like: Tensor) -> bool:
    heads, groups, rows, width = 4, 2, 5, 16
    q, k = (_random(like, 1, rows, n, width).transpose(1, 2) for n in (heads, groups))
    cos, sin = _random(like, 1, rows, width), _random(like, 1, rows, width)
    try:
        found_q, found_k = rotary(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments, or other shapes
        return False
    pairs = (found_q, q), (found_k, k)
    return all(_rotated_alike(found, elementwise.rotate(x, cos, sin)) for found, x in pairs)


def _rotated_alike(own: Tensor, native: Tensor) -> bool:
    """Tells whether results of random numbers are equal; in float32 a compiler joins a product and a sum into
    one operation, which rounds once."""
    if own.dtype is torch.float32:
        return torch.allclose(own, native, rtol=0.0, atol=1e-6)
    return torch.equal(own, native)


def _random(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _same(own: Any, native: Tensor) -> bool:
    """Tells whether results are equal, but for the rounding of a few numbers."""
    if not isinstance(own, Tensor) or own.shape != native.shape or own.dtype != native.dtype:
        return False
    near = torch.isclose(own, native, rtol=_ROUNDING[own.dtype], atol=0.0)
    return bool(near.all()) and float((own != native).float().mean()) <= _OFTEN[own.dtype]
