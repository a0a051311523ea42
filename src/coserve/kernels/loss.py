"""Cross-entropy and its gradient in one pass over a chunk of logits."""

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """(summed loss [], weight x its gradient [rows, vocabulary] in the logits' dtype).

    logits [rows, vocabulary], labels [rows] (every one a token: rows without a label never get here).
    One float32 buffer is reused for exponentials and gradient; the twin is `reference.cross_entropy`.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    rows = torch.arange(len(labels), device=labels.device)
    target = exact[rows, labels]
    peak = exact.amax(dim=-1, keepdim=True)
    exact.sub_(peak).exp_()
    total = exact.sum(dim=-1, keepdim=True)
    loss = (total.log() + peak).squeeze(-1).sub(target).sum()
    exact.mul_(weight / total)
    exact[rows, labels] -= weight
    return loss, exact.to(logits.dtype)
