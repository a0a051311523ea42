"""Losses and draws over a vocabulary of which a rank has the logits of some tokens.

Ranks exchange a few numbers of each row in place of its logits: the largest one, the sum of exponentials, the
targets' own. All put these together in the same order, so what they find is the same, bit for bit.
"""

from typing import Final

import torch
from torch import Tensor

from coserve.model.base import Base
from coserve.model.batch import Rows
from coserve.model.logits import Logits, Tail
from coserve.model.noise import gumbel
from coserve.model.sample import NO_TOKEN
from coserve.model.sampling_table import SamplingTable
from coserve.model.sharded.placement import GatheredColumnShard
from coserve.parallel.ranks import Ranks

_NEAR: Final = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_ROWS: Final = 3  # of the experiment


class LogitShards(Logits):
    """Logits of which a rank has `count` tokens', those after all earlier ranks'."""

    is_cut = True

    def __init__(self, head: GatheredColumnShard, ranks: Ranks, count: int) -> None:
        self._head, self._ranks, self.count = head, ranks, count
        self._first = ranks.number * count

    def of(self, tail: Tail, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """See `Logits`: of the rank's own tokens."""
        with self._head.in_parts():
            return tail(hidden, rows)

    def cross_entropy(self, logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """See `Logits`, here and below."""
        exact, total, found = self._totals(logits, labels[:, None])
        gradient = (exact - total).exp_().mul_(weight)
        self._add(gradient, labels[:, None], -weight)
        return (total - found).sum(), gradient.to(logits.dtype)

    def target_logprobs(self, logits: Tensor, labels: Tensor) -> Tensor:
        _, total, found = self._totals(logits, labels[:, None])
        return (found - total)[:, 0]

    def logprob_vjp(self, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        return self.candidate_vjp(logits, labels[:, None], gradient[:, None], 1.0)

    def candidate_logprobs(self, logits: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        _, total, found = self._totals(logits, candidates, temperature)
        return found - total

    def candidate_vjp(
        self, logits: Tensor, candidates: Tensor, gradient: Tensor, temperature: float
    ) -> Tensor:
        exact, total, _ = self._totals(logits, candidates, temperature)
        found = (exact - total).exp_().mul_(-gradient.sum(dim=-1, keepdim=True))
        self._add(found, candidates, gradient)
        return found.div_(temperature).to(logits.dtype)

    def top_logprobs(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        exact, total, _ = self._totals(logits, None)
        values, tokens = exact.topk(min(k, self.count), dim=-1)
        every, names = self._ranks.columns(values), self._ranks.columns(tokens + self._first)
        best, places = every.topk(k, dim=-1)
        return names.gather(1, places), best - total

    def likeliest(self, logits: Tensor) -> Tensor:
        return self._largest(logits)[1]

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
        """As `sample_plain`: the noise of a token is the same on whichever rank."""
        scores = logits.float()
        if not table.drawing.isdisjoint(slots.tolist()):
            temperature = table.temperature[slots, None]
            ids = torch.arange(self._first, self._first + self.count, device=logits.device)[None]
            noise = gumbel(table.seed[slots], positions, ids)
            scaled = scores / temperature.where(temperature > 0, 1.0)
            scores = torch.where(temperature > 0, scaled + noise, scores)
        best, tokens = self._largest(scores)
        return tokens.masked_fill(~best.isfinite(), NO_TOKEN)

    def _largest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest score of each row, and its token: the first of equal ones."""
        best, tokens = scores.max(dim=-1, keepdim=True)
        own = torch.cat((best.double(), (tokens + self._first).double()), -1)
        every, names = torch.unflatten(self._ranks.columns(own), -1, (-1, 2)).unbind(-1)
        found, place = every.max(dim=-1, keepdim=True)
        return found[:, 0], names.gather(1, place)[:, 0].long()

    def _totals(
        self, logits: Tensor, wanted: Tensor | None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rank's logits at a temperature in at least float32; of all ranks' the logarithm [rows, 1] of
        the sum of exponentials, and those of the tokens `wanted` [rows, k]."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        peak = exact.amax(dim=-1, keepdim=True)
        numbers = [peak, (exact - peak).exp_().sum(dim=-1, keepdim=True)]
        if wanted is not None:
            places, is_own = self._places(wanted)
            numbers.append(exact.gather(1, places).where(is_own, 0.0))
        own = torch.cat(numbers, -1)
        every = torch.unflatten(
            self._ranks.columns(own), -1, (self._ranks.count, -1)
        )  # [rows, ranks, numbers]
        peaks = every[..., 0]
        highest = peaks.amax(dim=-1, keepdim=True)
        total = ((peaks - highest).exp() * every[..., 1]).sum(dim=-1, keepdim=True).log() + highest
        return exact, total, every[..., 2:].sum(1)

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The places of tokens among the rank's own, and which ones these are."""
        places = tokens - self._first
        is_own = (places >= 0) & (places < self.count)
        return places.where(is_own, 0), is_own

    def _add(self, x: Tensor, tokens: Tensor, values: Tensor | float) -> None:
        """Adds values [rows, k] to those columns of x that tokens [rows, k] of the rank have."""
        places, is_own = self._places(tokens)
        x.scatter_add_(1, places, is_own * torch.as_tensor(values, dtype=x.dtype, device=x.device))


@torch.no_grad()
def cut_logits(base: Base, ranks: Ranks) -> Logits:
    """The computations with a base's logits, whose head may be cut by tokens: with parts of them where the
    model's tail gives each token's logit by itself; an experiment tells. All ranks call this together."""
    head = base.linears.get(base.modules.head or "")
    if head is None or not isinstance(head.placement, GatheredColumnShard):
        return base.logits
    x = torch.randn(1, _ROWS, base.hidden_size * base.streams, generator=torch.Generator().manual_seed(0))
    x = x.to(base.device, base.dtype)
    whole = base.tail(x)
    found = LogitShards(head.placement, ranks, whole.shape[-1] // ranks.count)
    try:
        own = found.of(base.tail, x)
        want = ranks.columns_of(whole)
        near = _NEAR[whole.dtype] * float(want.float().norm())
        differs = own.shape != want.shape or float((own - want).float().norm()) > near
    except (RuntimeError, IndexError, ValueError):  # the tail needs all tokens'
        differs = True
    return base.logits if ranks.totals([float(differs)])[0] else found
