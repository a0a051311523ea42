"""The kernels of `training.c` on tensors in bfloat16 on a CPU: operations of `ops.py` in a graph, attention's
softmax with what backward needs of it, and the loss.

The plain twins are autograd's own, the plain path of `blocked.py`, and `reference.cross_entropy`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.build import kernels


def takes(*tensors: Tensor) -> bool:
    """As `ops.takes`, in a graph."""
    return torch.is_grad_enabled() and all(map(ops.fits, tensors)) and kernels() is not None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.centred = eps, centred
        return ops.rms_norm(x, weight, eps, centred)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad, found, width = grads[0].contiguous(), torch.empty_like(x), x.shape[-1]
        ops.loaded().rms_norm_back(
            grad.data_ptr(), x.data_ptr(), weight.data_ptr(), found.data_ptr(), x.numel() // width, width,
            ctx.eps, ctx.centred, ops.threads(x.numel()),
        )  # fmt: skip
        return found, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """As `ops.rms_norm`; the weight is frozen."""
    y: Tensor = _RmsNorm.apply(x, weight, eps, centred)  # type: ignore[no-untyped-call]
    return y


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return ops.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad, of_gate, of_up = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        ops.loaded().silu_mul_back(
            grad.data_ptr(), gate.data_ptr(), up.data_ptr(), of_gate.data_ptr(), of_up.data_ptr(),
            gate.numel(), ops.threads(gate.numel()),
        )  # fmt: skip
        return of_gate, of_up


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `ops.silu_mul`; tensors without data of their own, such as expanded ones, are left to torch."""
    if not takes(gate, up):
        return F.silu(gate) * up
    y: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return ops.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        _, heads, rows, width = grad.shape
        found = grad.new_empty(1, rows, heads, width)
        ops.loaded().rotate_back(
            grad.data_ptr(), grad.stride(2), grad.stride(1), cos.data_ptr(), sin.data_ptr(), found.data_ptr(),
            rows, heads, width, ops.threads(grad.numel()),
        )  # fmt: skip
        return found.transpose(1, 2), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `ops.rotate`; tables have no gradient."""
    y: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def softmax_(scores: Tensor, rows: int, scale: float) -> Tensor:
    """Softmax in place of scores [n, blocks * rows, keys] times `scale`; the rows of a block are the last
    positions of the keys, and later keys get a weight of 0. Returns the log-sum-exp of each row in float32,
    [n * blocks * rows]."""
    keys = scores.shape[-1]
    blocks = scores.numel() // (rows * keys)
    lse = torch.empty(blocks * rows, dtype=torch.float32)
    ops.loaded().softmax_keeping(
        scores.data_ptr(), lse.data_ptr(), blocks, rows, keys, scale, ops.threads(scores.numel())
    )
    return lse


def softmax_back_(scores: Tensor, gradients: Tensor, lse: Tensor, rows: int, scale: float) -> None:
    """Turns the scores given to `softmax_` into its weights again, and `gradients` of these weights into
    those of the scores before `scale`, both in place; lse as `softmax_` returned it."""
    keys = scores.shape[-1]
    blocks, lse = scores.numel() // (rows * keys), lse.contiguous()
    ops.loaded().softmax_back(
        scores.data_ptr(), gradients.data_ptr(), lse.data_ptr(), blocks, rows, keys, scale,
        ops.threads(scores.numel()),
    )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """`loss.cross_entropy` of logits [rows, vocabulary] in bfloat16. Raises IndexError for other labels than
    [0, vocabulary)."""
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocabulary = logits.shape
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        raise IndexError(f"a label is none of {vocabulary} tokens")
    losses, gradient = torch.empty(rows, dtype=torch.float32), torch.empty_like(logits)
    ops.loaded().cross_entropy(
        logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), gradient.data_ptr(), rows, vocabulary,
        weight, ops.threads(logits.numel()),
    )  # fmt: skip
    return losses.sum(), gradient
