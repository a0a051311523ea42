"""Cross-entropy and its gradient in one pass over a chunk of logits; for other losses log-probabilities and
their VJP, of one target of each row or of several candidates."""

import torch
from torch import Tensor

from coserve.kernels.native import gradients, ops


def cross_entropy(logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """(summed loss [], weight x its gradient [rows, vocabulary] in the logits' dtype).

    logits [rows, vocabulary], labels [rows], all valid token ids. One float32 buffer is reused for
    exponentials and gradient; the twin is `reference.cross_entropy`.
    """
    if ops.takes(logits):
        return gradients.cross_entropy(logits, labels, weight)
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


def target_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [rows] of labels [rows], in at least float32; logits [rows, vocabulary]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact.gather(1, labels[:, None]).squeeze(1) - exact.logsumexp(-1)


def logprob_vjp(logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
    """The gradient [rows, vocabulary] for logits, in their dtype, from `gradient` [rows] for the labels'
    log-probabilities."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    rows = torch.arange(len(labels), device=labels.device)
    exact.sub_(exact.amax(dim=-1, keepdim=True)).exp_()
    exact.mul_(-gradient[:, None] / exact.sum(dim=-1, keepdim=True))
    exact[rows, labels] += gradient
    return exact.to(logits.dtype)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens of each row, the likeliest first: (ids [rows, k], log-probabilities [rows, k]
    in at least float32); logits [rows, vocabulary]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, tokens = exact.topk(k, dim=-1)
    return tokens, values - exact.logsumexp(-1, keepdim=True)


def candidate_logprobs(logits: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [rows, k] of candidates [rows, k] at a temperature, in at least float32; logits
    [rows, vocabulary]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return exact.gather(1, candidates) - exact.logsumexp(-1, keepdim=True)


def candidate_vjp(logits: Tensor, candidates: Tensor, gradient: Tensor, temperature: float) -> Tensor:
    """The gradient [rows, vocabulary] for logits, in their dtype, from `gradient` [rows, k] for
    `candidate_logprobs`. The candidates of a row differ."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    exact.sub_(exact.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
    exact.mul_(-gradient.sum(dim=-1, keepdim=True) / exact.sum(dim=-1, keepdim=True))
    exact.scatter_add_(1, candidates, gradient)
    return exact.div_(temperature).to(logits.dtype)
