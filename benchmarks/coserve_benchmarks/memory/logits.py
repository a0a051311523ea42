"""Differences between two bases' logits, over whole texts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.attention.states import Core
from coserve.kernels.attention import AttentionSpec, attend
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.workload.requests import Tokens


@dataclass(frozen=True, slots=True)
class LogitError:
    """Against exact logits: `relative` is the root mean square of the difference over the standard deviation
    of a row, `divergence` the mean Kullback-Leibler divergence in nats, `agreement` how often the likeliest
    token is the same."""

    relative: float
    divergence: float
    agreement: float

    @staticmethod
    def between(exact: Tensor, found: Tensor) -> "LogitError":
        """Errors of logits [rows, vocabulary]. An offset common to all logits of a row does not count."""
        centred = exact - exact.mean(-1, keepdim=True)
        difference = found - found.mean(-1, keepdim=True) - centred
        wanted, given = exact.log_softmax(-1), found.log_softmax(-1)
        return LogitError(
            float((difference.square().mean(-1) / centred.square().mean(-1)).sqrt().mean()),
            float((wanted.exp() * (wanted - given)).sum(-1).mean()),
            float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
        )


@torch.no_grad()
def logits_of(base: Base, texts: Iterable[Tokens]) -> Tensor:
    """Logits of `base` after every token, float32 [rows, vocabulary], text after text."""
    return torch.cat([_logits(base, torch.tensor(text, device=base.device)).float().cpu() for text in texts])


class _WholeSequence:
    """A sequence from its beginning to its end."""

    keeper = None

    def __init__(self, count: int) -> None:
        self.count = count

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return attend(q, k, v, spec).transpose(1, 2)

    def mix(self, core: Core, start: int) -> Tensor:
        return core.run(slice(start, start + self.count), 1, None)[0]


def _logits(base: Base, tokens: Tensor) -> Tensor:
    rows = FusedRows([_WholeSequence(len(tokens))], [])
    hidden, calls = base.prologue(tokens, torch.arange(len(tokens), device=tokens.device))
    with base.cell.set(rows):
        for layer in range(base.depth):
            hidden = base.chain.layer(layer, hidden, calls)
    return base.tail(hidden)
