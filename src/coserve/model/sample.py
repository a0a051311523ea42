"""Samples the next token of many rows at once.

A step samples for any mix of requests, with their parameters in a `SamplingTable`. If all are greedy,
`sample` is one argmax, of bfloat16 numbers as they are where there is a kernel. Where there is one for draws
(`kernels.native.draw`) it gives most rows their tokens, the same ones as the path written out here.

The order is transformers': bias, penalties, suppressed tokens, then temperature, top-k, top-p, min-p.

The draw adds to every logit a Gumbel noise that is hashed from (request seed, position, token) and takes the
largest sum, which is an exact draw from the softmax. When the cumulative distribution is inverted instead, a
last-bit change of one logit can swap two neighbours of the sorted order or shift every later border. Here it
changes the answer only if the two largest sums are that close. It needs no sort, and the noise of a token
does not depend on which other tokens or rows were considered.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.core.plan import TokenLogprobs
from coserve.kernels.native import draw as native_draw
from coserve.kernels.native import ops as native
from coserve.model.noise import gumbel
from coserve.model.sampling_table import SamplingTable

__all__ = ["NO_TOKEN", "Logprobs", "SamplingTable", "narrowed", "sample", "sample_plain", "token_logprobs"]

NO_TOKEN = -1  # in place of a token, where there is none to choose
ROWS_AT_ONCE = 32  # rows drawn together; bounds the temporaries, about 24 bytes per row and vocabulary entry


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: SamplingTable,
    ahead: Sequence[Sequence[int]] = (),
) -> Tensor:
    """The next token of every row, [B] int64; `NO_TOKEN` where all are suppressed, or where the logits are
    not numbers.

    `logits` [B, V] are the model's own and stay untouched; `slots` [B] are the rows' slots in `table`, and
    `positions` [B] those of the sampled tokens in their sequences (prompt and answer). Several rows of a slot
    have tokens `ahead` of theirs that are not recorded yet.
    """
    if table.is_plain and not table.drawing and native.takes(logits):
        return native.argmax(logits)  # `NO_TOKEN` too is the kernel's
    if not table.is_plain:
        logits = table.adjusted(logits.float(), slots, positions, ahead)
    if not native_draw.takes(logits):
        return _possible(_sample(logits.float(), slots, positions, table), logits)
    tokens = native_draw.draw(logits, slots, positions, table.columns)
    left = (tokens == native_draw.UNDECIDED).nonzero().squeeze(1)
    if len(left):
        tokens[left] = _sample(logits[left].float(), slots[left], positions[left], table)
    return _possible(tokens, logits)


def sample_plain(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, draws: bool
) -> Tensor:
    """As `sample`, for slots that are plain (`SamplingTable.are_plain`), some of which draw where `draws`.
    The host waits for nothing, so that a graph may hold it."""
    exact = logits.float()
    tokens = exact.argmax(dim=-1)
    if draws:
        temperature = table.temperature[slots, None]
        ids = torch.arange(table.vocab, device=logits.device)[None]
        scaled = exact / temperature.where(temperature > 0, 1.0)
        parts = zip(*(x.split(ROWS_AT_ONCE) for x in (scaled, table.seed[slots], positions)), strict=True)
        drawn = [(scores + gumbel(seeds, own, ids)).argmax(-1) for scores, seeds, own in parts]
        tokens = torch.cat(drawn).where(temperature[:, 0] > 0, tokens)
    return _possible(tokens, logits)


def _possible(tokens: Tensor, logits: Tensor) -> Tensor:
    """`tokens` [B] with `NO_TOKEN` for those whose own logit is not finite: a token is only chosen with such
    a one where no other has a finite one, or where the largest is no number."""
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens.masked_fill(~chosen.isfinite(), NO_TOKEN)


def _sample(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
    """As `sample`, for adjusted logits in float32, without kernels: this specifies the kernel's tokens."""
    tokens = logits.argmax(dim=-1)
    if not table.drawing:
        return tokens
    drawing = table.temperature[slots] > 0
    kinds = [drawing]
    if table.limited or table.nucleus:
        # Apart, so that a top-p without a top-k does not make the others sort the whole vocabulary.
        limited, nucleus = table.top_k[slots] > 0, table.tail[slots] >= 0
        kinds = [drawing & limited, drawing & ~limited & nucleus, drawing & ~limited & ~nucleus]
    for kind in kinds:
        for rows in kind.nonzero().squeeze(1).split(ROWS_AT_ONCE):
            if len(rows):  # nothing splits into one empty piece
                tokens[rows] = _draw(logits[rows], slots[rows], positions[rows], table)
    return tokens


def _draw(logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
    """Tokens [R] drawn from `logits` [R, V] after temperature, top-k, top-p and min-p."""
    scores, ids = narrowed(logits, slots, table)
    return ids.gather(1, (scores + gumbel(table.seed[slots], positions, ids)).argmax(-1, keepdim=True))[:, 0]


def narrowed(logits: Tensor, slots: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor]:
    """(scores, token ids), both [R, C]: the candidates of each row, with -inf for dropped ones."""
    scores = logits / table.temperature[slots, None]
    top_k, width = table.top_k[slots], table.vocab
    if table.limited:
        scores = _keep_top_k(scores, top_k)
        # Ties with the k-th stay, as in transformers, so a row can have more than k survivors.
        width = int((scores > -torch.inf).sum(-1).amax()) if bool((top_k > 0).all()) else width
    ids = torch.arange(table.vocab, device=scores.device).expand(len(scores), -1)
    nucleus = bool(table.nucleus) and bool((table.tail[slots] >= 0).any())
    if nucleus or width < table.vocab:
        scores, ids = _ascending(scores, max(width, 1))
    if nucleus:
        beyond = scores.softmax(-1).cumsum(-1) <= table.tail[slots, None]
        beyond[:, -1] = False
        scores = scores.masked_fill(beyond, -torch.inf)
    if table.floored:
        # p < min_p * p_max, without the softmax: its denominator is on both sides
        floor = scores.amax(-1, keepdim=True) + table.floor[slots, None]
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores, ids


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Drops scores below the k-th of each row; `top_k` [R], 0 keeps all."""
    widest = min(int(top_k.amax()), scores.shape[1])
    if widest == 0:
        return scores
    best = scores.topk(widest, dim=-1).values
    border = best.gather(1, (top_k - 1).clamp(0, widest - 1)[:, None])
    return scores.masked_fill((scores < border) & (top_k > 0)[:, None], -torch.inf)


def _ascending(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(scores, token ids), both [R, width]: the `width` largest in ascending order, ties by token id."""
    if width == scores.shape[1]:
        return scores.sort(dim=-1, stable=True)
    ids = scores.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    scores, order = scores.gather(1, ids).sort(dim=-1, stable=True)
    return scores, ids.gather(1, order)


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities: `chosen` [B], `top` [B, k] with its token ids `top_ids` [B, k]."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def rows(self) -> list[TokenLogprobs]:
        """The log-probabilities as plain data, one per row."""
        chosen, top, ids = self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(own, tuple(zip(row_ids, row, strict=True)))
            for own, row, row_ids in zip(chosen, top, ids, strict=True)
        ]


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities of `tokens` [B] and of the `k` likeliest tokens under `logits` [B, V]."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return Logprobs((logits.gather(1, tokens[:, None]) - total)[:, 0], top - total, top_ids)
