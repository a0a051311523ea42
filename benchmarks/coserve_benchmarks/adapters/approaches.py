"""The report's approaches on one model: a pass for each adapter, or one pass of all whose adapters are
multiplied in one way or another.

The model is transformers', its frozen linears are placed as the engine's are. So what differs between the
approaches is the adapters' products and nothing else.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.kernels import many
from coserve.kernels.dispatch import Approach, make_way
from coserve.kernels.layout import Layout
from coserve.kernels.many import Way
from coserve.model.linear import frozen
from coserve.model.placement import Placement, place_locally
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.adapters.peers import Context

NAIVE: Final = "naive"
APPROACHES: Final = (NAIVE, str(Approach.GROUPED), str(Approach.BLOCK_SPARSE))
_SPREAD: Final = 0.02  # of the adapters' random numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows of several adapters: adapter i has `ranks[i]` ranks and `shares[i]` rows, at least one,
    of `length` tokens each. Rows of one adapter are adjacent."""

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    length: int = 1

    @property
    def rows(self) -> int:
        return sum(self.shares)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Pass:
    """Some rows of a batch through the whole model, with `ranks` of every linear's table."""

    rows: slice
    ranks: slice
    way: Way


def passes_of(batch: Batch, approach: str) -> Iterator[Pass]:
    """Passes of a batch: one for each adapter in the naive approach, else one for all."""
    row_ends, rank_ends = list(accumulate(batch.shares)), list(accumulate(batch.ranks))
    rows = [slice(end - share, end) for end, share in zip(row_ends, batch.shares, strict=True)]
    if approach != NAIVE:
        segments = [
            (slice(own.start * batch.length, own.stop * batch.length), i) for i, own in enumerate(rows)
        ]
        layout = Layout.of(segments, batch.ranks)
        way = make_way(layout, batch.tokens, torch.device("cpu"), Approach(approach))
        yield Pass(slice(0, batch.rows), slice(0, layout.total_ranks), way)
        return
    for own, rank, end in zip(rows, batch.ranks, rank_ends, strict=True):
        tokens = (own.stop - own.start) * batch.length
        layout = Layout.of([(slice(0, tokens), 0)], [rank])
        yield Pass(own, slice(end - rank, end), make_way(layout, tokens, torch.device("cpu")))


class SharedModel:
    """A model with room for adapters of `ranks` ranks in all beside every linear of its layers."""

    def __init__(self, shape: ModelShape, ranks: int) -> None:
        self.shape, self.model = shape, shape.build().requires_grad_(False)
        layers = {id(module) for module in self.model.model.layers.modules()}
        self.linears: list[Linear] = []
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                linear = Linear(module, ranks if id(module) in layers else 0)
                if id(module) in layers:
                    self.linears.append(linear)

    def use(self, own: Pass, leaves: Sequence[Tensor] | None = None) -> None:
        """Sets what every linear adds: the products of `leaves` [A, B, A, B, ...], or of the tables
        themselves."""
        for number, linear in enumerate(self.linears):
            linear.way = own.way
            linear.own = (
                (linear.a[own.ranks], linear.b[own.ranks])
                if leaves is None
                else (leaves[2 * number], leaves[2 * number + 1])
            )

    def leaves(self, own: Pass) -> list[Tensor]:
        """Parameters that train, in the order of `use`."""
        tables = [table for linear in self.linears for table in (linear.a, linear.b)]
        return [table[own.ranks].detach().requires_grad_() for table in tables]


class Linear:
    """A frozen linear and the adapters beside it: tables of A [ranks, in] and of B [ranks, out]."""

    def __init__(self, module: nn.Linear, ranks: int) -> None:
        weight = module.weight.detach()
        self._placement: Placement = place_locally(weight, None)
        draws = torch.Generator().manual_seed(0)
        self.a, self.b = (
            _SPREAD * torch.randn(1, width, generator=draws).to(weight.dtype).repeat(ranks, 1)
            for width in reversed(weight.shape)
        )
        self.way: Way | None = None
        self.own = self.a, self.b
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)  # its bytes are elsewhere
        module.forward = self  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        y = frozen(x, self._placement, None)
        if self.way is None:
            return y
        x2, y2 = x.flatten(0, -2), y.flatten(0, -2)
        if torch.is_grad_enabled():
            return many.add(x2, y2, *self.own, self.way).view(y.shape)
        many.add_(x2, y2, *self.own, self.way)
        return y


class DecodeStep:
    """A call decodes one token for every row of a batch and returns the seconds that took."""

    def __init__(self, shared: SharedModel, batch: Batch, approach: str, context: int) -> None:
        self._shared = shared
        self._passes = [
            (own, Context(shared.shape, own.rows.stop - own.rows.start, context))
            for own in passes_of(batch, approach)
        ]

    @torch.no_grad()
    def __call__(self) -> float:
        seconds = 0.0
        for own, context in self._passes:
            ids, cache = context.begin()
            self._shared.use(own)
            started = time.perf_counter()
            self._shared.model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            seconds += time.perf_counter() - started
        return seconds


class TrainStep:
    """A call is one optimizer step of every adapter of a batch, and returns the seconds that took."""

    def __init__(self, shared: SharedModel, batch: Batch, approach: str) -> None:
        self._shared = shared
        draws = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, shared.shape.vocabulary, (batch.rows, batch.length), generator=draws)
        self._passes = [(own, shared.leaves(own)) for own in passes_of(batch, approach)]
        leaves = [leaf for _, of_pass in self._passes for leaf in of_pass]
        self._optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)

    def __call__(self) -> float:
        model: Any = self._shared.model
        started = time.perf_counter()
        for own, leaves in self._passes:
            self._shared.use(own, leaves)
            ids = self._ids[own.rows]
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started
