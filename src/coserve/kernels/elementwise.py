"""Norms, rotary embedding and gated activation by the kernels of a device, in a graph or without.

A processor's are in C, for bfloat16 (`native/ops.py`), a GPU's are Triton's (`triton/elementwise.py`). The
plain twins are the models' own modules and autograd.
"""

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coserve.kernels.native import ops
from coserve.kernels.native.build import kernels
from coserve.kernels.triton import is_installed


class ElementwiseKernels(Protocol):
    """The kernels of a device, without a graph. See `native.ops`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor: ...

    def rms_norm_back(self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def rotate_back(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def silu_mul_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]: ...


def takes(*tensors: Tensor) -> bool:
    """Tells whether there are kernels that read all these tensors, whose last dimension must be dense, and
    which must have data and one type."""
    if tensors[0].is_cpu:
        return ops.fit(*tensors) and kernels(tensors[0].dtype) is not None
    return is_installed() and all(_is_on_gpu(x) and x.dtype is tensors[0].dtype for x in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """x [..., width] over its root mean square, times `weight` [width], which is frozen, or where `centred`
    times 1 + weight. Rounded before the weight is applied, unless `centred`."""
    if not torch.is_grad_enabled():
        return _kernels(x).rms_norm(x, weight, eps, centred)
    y: Tensor = _RmsNorm.apply(x, weight, eps, centred)  # type: ignore[no-untyped-call]
    return y


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The sum of x and y [..., width], rounded, and its `rms_norm`, without a graph; on a GPU in one
    launch."""
    if x.is_cpu:
        total = x + y
        return total, ops.rms_norm(total, weight, eps, centred)
    from coserve.kernels.triton import elementwise

    return elementwise.add_rms_norm(x, y, weight, eps, centred)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [1, heads, rows, width] by cos and sin [1, rows, width], whose second half
    rotates with the first (Llama's `apply_rotary_pos_emb`). Tables have no gradient."""
    if not torch.is_grad_enabled():
        return _kernels(x).rotate(x, cos, sin)
    y: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both of one shape; tensors without data of their own, such as expanded ones, are left
    to torch."""
    if not takes(gate, up):
        return F.silu(gate) * up
    if not torch.is_grad_enabled():
        return _kernels(gate).silu_mul(gate, up)
    y: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


def _is_on_gpu(x: Tensor) -> bool:
    if not x.is_cuda or type(x) not in (Tensor, nn.Parameter) or x.stride(-1) != 1:
        return False
    from coserve.kernels.triton import elementwise

    return elementwise.fits(x)


def _kernels(x: Tensor) -> ElementwiseKernels:
    if x.is_cpu:
        return ops
    from coserve.kernels.triton import elementwise

    return cast(ElementwiseKernels, elementwise)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, centred
        return _kernels(x).rms_norm(x, weight, eps, centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        return _kernels(x).rms_norm_back(grads[0], x, weight, *ctx.settings), None, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _kernels(gate).silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _kernels(gate).silu_mul_back(grads[0], gate, up)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _kernels(x).rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _kernels(grads[0]).rotate_back(grads[0], *ctx.saved_tensors), None, None
