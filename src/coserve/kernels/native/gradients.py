"""The kernels of `training.c` on tensors in bfloat16 or float32 on a CPU that are no operations of a model:
attention's softmax with what backward needs of it, and the loss.

The plain twins are the plain path of `blocked.py` and `reference.cross_entropy`.
"""

import torch
from torch import Tensor

from coserve.kernels.native import ops


def softmax_(scores: Tensor, rows: int, scale: float) -> Tensor:
    """Softmax in place of scores [n, blocks * rows, keys] times `scale`; the rows of a block are the last
    positions of the keys, and later keys get a weight of 0. Returns the log-sum-exp of each row in float32,
    [n * blocks * rows]."""
    keys = scores.shape[-1]
    blocks = scores.numel() // (rows * keys)
    lse = torch.empty(blocks * rows, dtype=torch.float32)
    ops.loaded(scores).softmax_keeping(
        scores.data_ptr(), lse.data_ptr(), blocks, rows, keys, scale, ops.threads(scores.numel())
    )
    return lse


def softmax_back_(scores: Tensor, gradients: Tensor, lse: Tensor, rows: int, scale: float) -> None:
    """Turns the scores given to `softmax_` into its weights again, and `gradients` of these weights into
    those of the scores before `scale`, both in place; lse as `softmax_` returned it."""
    keys = scores.shape[-1]
    blocks, lse = scores.numel() // (rows * keys), lse.contiguous()
    ops.loaded(scores).softmax_back(
        scores.data_ptr(), gradients.data_ptr(), lse.data_ptr(), blocks, rows, keys, scale,
        ops.threads(scores.numel()),
    )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """`loss.cross_entropy` of logits [rows, vocabulary]. Raises IndexError for other labels than
    [0, vocabulary)."""
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocabulary = logits.shape
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        raise IndexError(f"a label is none of {vocabulary} tokens")
    losses, gradient = torch.empty(rows, dtype=torch.float32), torch.empty_like(logits)
    ops.loaded(logits).cross_entropy(
        logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), gradient.data_ptr(), rows, vocabulary,
        weight, ops.threads(logits.numel()),
    )  # fmt: skip
    return losses.sum(), gradient
