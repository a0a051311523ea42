"""A low-rank bypass over some rows, in place (inference) or in a graph (training)."""

import torch
from torch import Tensor


def add_(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """y += scale · x Aᵀ Bᵀ in place; x [rows, in], y [rows, out], a [rank, in], b [out, rank]."""
    y.addmm_(x @ a.t(), b.t(), alpha=scale)


def add(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`add_` out of place, differentiable in x, y, a and b."""
    return torch.addmm(y, x @ a.t(), b.t(), alpha=scale)
