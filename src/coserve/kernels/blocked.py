"""Causal attention in bfloat16 on a CPU, as batched products over blocks of queries.

torch's flash attention takes 16.6 ms for 512 queries, 16 heads over 8 groups of width 64, on one core with
bfloat16 units; its inner products do not use them. The same scores as one batched product take 1.1 ms,
softmax 1.9 ms in float32. Blocks of queries skip the keys that come after them and keep the scores in the
caches. Queries of one group share its keys as rows of one product, so nothing is repeated.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.core.row_buckets import ONEDNN
from coserve.kernels.native import gradients
from coserve.kernels.native import ops as native

_BLOCK = 128  # queries; scores of 16 heads over 1,000 keys then take 8 MiB in float32
# Most scores of a block, over all examples that are attended together, so that they stay in the caches: in
# float32 a pass over [32, 256, 512] took 6 ms, over [32, 256, 384] 0.3 ms.
_SCORES = 1 << 20
# -inf above the diagonal, 0 elsewhere; adding it takes a fifth of filling by a mask. Made here, not when it
# is first needed: that may be while layers are traced on tensors without data, and such a one masks nothing.
_CAUSAL_BIAS = torch.full((_BLOCK, _BLOCK), float("-inf"), dtype=torch.float32).triu(1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q [batch, heads, t, dk] over k [batch, groups, length, dk], v [batch, groups, length, dv], with queries
    at the last `t` positions; returns [batch, heads, t, dv]. Without a graph."""
    return forward(q, k, v, scale, window)[0]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, with_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """`attention`, and with `with_lse` the log-sum-exp of each query's scores in float32, [batch, heads, t]
    (else empty)."""
    if native.attends_chunks(q, k, v):
        return native.attend_chunks(q, k, v, scale, window, with_lse)
    t, missing = q.shape[2], _missing(q)
    if missing:
        q, k, v = (_filled(x, missing) for x in (q, k, v))
    out = _empty(q, v.shape[-1])
    lse = torch.empty(q.shape[:3] if with_lse else 0, dtype=torch.float32, device=q.device)
    for some in _batches(q, k):
        own = lse[some] if with_lse else None
        _forward(_grouped(q[some], k), k[some], v[some], scale, window, _grouped(out[some], k), own)
    if missing:
        out, lse = out[:, :, :t], lse[:, :, :t] if with_lse else lse
    return out, lse


def _forward(
    grouped: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, into: Tensor, lse: Tensor | None
) -> None:
    """Attention of `grouped` queries; writes the output to `into`, in their form, and to `lse`, if any."""
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    lse_into = None if lse is None else lse.view(grouped.shape[:-1])
    is_native = window is None and native.takes(grouped)
    for rows, seen in _blocks(grouped.shape[3], k.shape[2], window):
        queries, count = _rows(grouped[:, :, :, rows]), rows.stop - rows.start
        if is_native:
            weights = torch.bmm(queries, keys[:, seen].transpose(1, 2))
            block = gradients.softmax_(weights, count, scale)
        else:
            scores = _scores(queries, keys[:, seen], rows, seen, scale, window)
            weights = scores.softmax(-1)
            if lse_into is not None:
                # At the largest score: two passes, where a logsumexp of its own takes four.
                block = scores.amax(-1).sub_(weights.amax(-1).log_())
        part = torch.bmm(weights.to(v.dtype), values[:, seen])
        into[:, :, :, rows] = part.view(*into.shape[:3], count, v.shape[-1])
        if lse_into is not None:
            lse_into[..., rows] = block.view(*into.shape[:3], count)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v from that of the output and the results of `forward`. The log-sum-exp turns
    scores into weights in one pass; the softmax correction of a row is out · grad, or, the same, the sum of
    its weights times their gradients."""
    if native.goes_back_chunks(grad, q, k, v, out):
        return native.attend_chunks_back(grad, q, k, v, out, lse, scale, window)
    t, missing = q.shape[2], _missing(q)
    if missing:
        grad, q, k, v, out = (_filled(x, missing) for x in (grad, q, k, v, out))
        lse = F.pad(lse, (0, missing))
    dq = _empty(q, q.shape[-1])
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    for some in _batches(q, k):
        given, queries, before, into = (_grouped(x[some], k) for x in (grad, q, out, dq))
        found = _backward(given, queries, before, k[some], v[some], lse[some], scale, window, into)
        for total, own in zip((dk[some], dv[some]), found, strict=True):
            total.copy_(own.view(total.shape))
    if missing:
        length = k.shape[2] - missing
        return dq[:, :, :t], dk[:, :, :length], dv[:, :, :length]
    return dq, dk, dv


def _backward(
    given: Tensor,
    grouped: Tensor,
    out: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    dq_into: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients for k and v in float32, [batch * groups, length, width]; writes those of the queries to
    `dq_into`. Gradients and outputs have the form of `grouped` queries."""
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    lse = lse.reshape(grouped.shape[:-1])
    dk = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
    dv = torch.zeros(values.shape, dtype=torch.float32, device=keys.device)
    is_native = window is None and native.takes(grouped)
    owed = None if is_native else (given.float() * out).sum(-1)
    for rows, seen in _blocks(grouped.shape[3], k.shape[2], window):
        count = rows.stop - rows.start
        queries, block, of_rows = (_rows(x[:, :, :, rows]) for x in (grouped, given, lse[..., None]))
        dscores = torch.bmm(block, values[:, seen].transpose(1, 2))
        if owed is None:
            weights = torch.bmm(queries, keys[:, seen].transpose(1, 2))
            gradients.softmax_back_(weights, dscores, of_rows, count, scale)
        else:
            weights = _scores(queries, keys[:, seen], rows, seen, scale, window).sub_(of_rows).exp_()
            product = dscores.float().sub_(_rows(owed[:, :, :, rows, None])).mul_(weights)
            dscores, weights = product.mul_(scale).to(queries.dtype), weights.to(v.dtype)
        dv[:, seen] += torch.bmm(weights.transpose(1, 2), block)
        dq_into[:, :, :, rows] = torch.bmm(dscores, keys[:, seen]).view(*dq_into.shape[:3], count, -1)
        dk[:, seen] += torch.bmm(dscores.transpose(1, 2), queries)
    return dk, dv


def _missing(q: Tensor) -> int:
    return ONEDNN.pad_rows(q.shape[2]) - q.shape[2]


def _filled(x: Tensor, missing: int) -> Tensor:
    """Pads keys after the last position, where no query attends."""
    return F.pad(x, (0, 0, 0, missing))


def _batches(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Ranges of the batch whose scores of one block stay in the caches."""
    batch, heads, t, _ = q.shape
    most = max(1, _SCORES // (heads * min(t, _BLOCK) * k.shape[2]))
    return (slice(start, min(start + most, batch)) for start in range(0, batch, most))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[batch, heads, t, width] as [batch, groups, heads / groups, t, width], a view."""
    batch, heads, t, width = x.shape
    groups = k.shape[1]
    return x.view(batch, groups, heads // groups, t, width)


def _empty(q: Tensor, width: int) -> Tensor:
    """An empty [batch, heads, t, width] with rows outermost in memory, as models use it."""
    batch, heads, t, _ = q.shape
    return q.new_empty(batch, t, heads, width).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[batch, groups, heads of a group, rows, width] as [batch * groups, heads * rows, width], the rows of
    one product."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def _blocks(queries: int, keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that any of its rows attends to."""
    offset = keys - queries
    for start in range(0, queries, _BLOCK):
        end = min(start + _BLOCK, queries)
        first = 0 if window is None else max(0, offset + start + 1 - window)
        yield slice(start, end), slice(first, offset + end)


def _scores(
    queries: Tensor, keys: Tensor, rows: slice, seen: slice, scale: float, window: int | None
) -> Tensor:
    """Scores [n, heads of a group * rows, keys seen] of one block's queries, its rows, in float32; -inf where
    masked."""
    count = rows.stop - rows.start
    scores = torch.bmm(queries, keys.transpose(1, 2)).float().mul_(scale)
    by_row = scores.view(scores.shape[0], -1, count, scores.shape[-1])
    width = scores.shape[-1]
    if window is None:  # the block's last row sees every key here: only the newest ones need a mask
        by_row[..., width - count :] += _CAUSAL_BIAS[:count, :count]
    else:
        position = torch.arange(seen.stop - count, seen.stop, device=keys.device)[:, None]
        age = position - torch.arange(seen.start, seen.stop, device=keys.device)
        by_row.masked_fill_((age < 0) | (age >= window), float("-inf"))
    return scores
