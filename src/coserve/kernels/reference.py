"""Plain reference implementations that each fast path must equal."""

import torch
from torch import Tensor

from coserve.kernels.lora.layout import Layout


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
    return attention_forward(q, k, v, scale, allowed, softcap, sinks)[0]


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    allowed: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores, [batch, heads, t]."""
    heads = q.shape[1]
    scores = _capped(_scores(q, k, scale), softcap).masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(q.shape[0], heads, q.shape[2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        lse = torch.cat([scores, sink], dim=-1).logsumexp(-1)
    else:
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    return weights.to(v.dtype) @ _repeated(v, heads), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    allowed: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v from that of the output and the results of `attention_forward`. The
    log-sum-exp includes sinks."""
    heads, groups = q.shape[1], k.shape[1]
    capped = _capped(_scores(q, k, scale), softcap)
    weights = (capped.masked_fill(~allowed, float("-inf")) - lse[..., None]).exp()
    exact = weights.dtype
    towards = (grad @ _repeated(v, heads).transpose(2, 3)).to(exact)
    owed = (grad.to(exact) * out.to(exact)).sum(-1, keepdim=True)
    dscores = weights * (towards - owed) * scale
    if softcap is not None:
        dscores = dscores * (1 - (capped / softcap) ** 2)
    dscores = dscores.to(q.dtype)
    dq = dscores @ _repeated(k, heads)
    dk = dscores.transpose(2, 3) @ q
    dv = weights.to(v.dtype).transpose(2, 3) @ grad
    return dq, _gathered(dk, groups), _gathered(dv, groups)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    exact = torch.promote_types(q.dtype, torch.float32)
    return (q @ _repeated(k, q.shape[1]).transpose(2, 3)).to(exact) * scale


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """x [batch, groups, ...] with each group repeated for the heads that share it, [batch, heads, ...]."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _gathered(x: Tensor, groups: int) -> Tensor:
    """Sums over the heads that share a group."""
    return x.view(x.shape[0], groups, -1, *x.shape[2:]).sum(2)


def lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """y + scale · x Aᵀ Bᵀ for x [rows, in], y [rows, out], a [rank, in], b [out, rank]."""
    return y + scale * ((x @ a.T) @ b.T)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss over rows, and its gradient for the logits; logits [rows, vocabulary], labels [rows]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = exact.log_softmax(-1)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(exact.dtype)
    return -(logprobs * one_hot).sum(), logprobs.exp() - one_hot


def shrink(x: Tensor, a: Tensor, layout: Layout) -> Tensor:
    """x [rows, in] times each row's ranks of a [ranks, in]: [rows, ranks], zero outside the layout's
    blocks."""
    h = x.new_zeros(len(x), len(a))
    for rows, ranks in layout:
        h[rows, ranks] = x[rows] @ a[ranks].T
    return h


def expand(h: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """The blocks of h [rows, ranks] times b [ranks, out]: [rows, out]."""
    y = h.new_zeros(len(h), b.shape[1])
    for rows, ranks in layout:
        y[rows] = h[rows, ranks] @ b[ranks]
    return y


def outer(h: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """The blocks of hᵀ [ranks, rows] times x [rows, in]: [ranks, in], the form of the gradients of A and
    B."""
    found = x.new_zeros(h.shape[1], x.shape[1])
    for rows, ranks in layout:
        found[ranks] += h[rows, ranks].T @ x[rows]
    return found


def multi_lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """y plus each row's x Aᵀ B; x [rows, in], y [rows, out], a [ranks, in], b [ranks, out] (B transposed,
    times its adapter's scale)."""
    return y + expand(shrink(x, a, layout), b, layout)


def multi_lora_backward(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for x, a and b from that of the result of `multi_lora` [rows, out]."""
    between = shrink(grad, b, layout)
    return expand(between, a, layout), outer(between, x, layout), outer(shrink(x, a, layout), grad, layout)
