"""The plain twins: what each fast path must equal, written to be read."""

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    allowed: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [batch, heads, t, dk], k [batch, groups, length, dk], v [batch, groups, length, dv], allowed bool
    [t, length]; returns [batch, heads, t, dv]. Softmax in at least float32."""
    heads = q.shape[1]
    k, v = k.repeat_interleave(heads // k.shape[1], 1), v.repeat_interleave(heads // v.shape[1], 1)
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(2, 3)).to(exact) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.to(exact).view(1, heads, 1, 1).expand(q.shape[0], heads, q.shape[2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v


def lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """y + scale · x Aᵀ Bᵀ for x [rows, in], y [rows, out], a [rank, in], b [out, rank]."""
    return y + scale * ((x @ a.T) @ b.T)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss over rows, and its gradient for the logits; logits [rows, vocabulary], labels [rows]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = exact.log_softmax(-1)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(exact.dtype)
    return -(logprobs * one_hot).sum(), logprobs.exp() - one_hot
