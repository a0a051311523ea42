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

from coserve.kernels.lora.backend import LoraSegment
from coserve.kernels.lora.dispatch import Approach
from coserve.kernels.lora.segments import LoraBackends, LoraSegments
from coserve.model.linear import bypassed, frozen
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
    """Some rows of a batch through the whole model. Each adapter there has some of the pass's tokens, in
    order, and `ranks` of every linear's table."""

    rows: slice
    tokens: tuple[slice, ...]
    ranks: tuple[slice, ...]
    backends: LoraBackends


def passes_of(batch: Batch, approach: str) -> Iterator[Pass]:
    """Passes of a batch: one for each adapter in the naive approach, else one for all."""
    rows, ranks = _spans(batch.shares), _spans(batch.ranks)
    if approach != NAIVE:
        tokens = tuple(slice(own.start * batch.length, own.stop * batch.length) for own in rows)
        yield Pass(slice(0, batch.rows), tokens, ranks, LoraBackends(Approach(approach)))
        return
    for own, rank in zip(rows, ranks, strict=True):
        tokens = (slice(0, (own.stop - own.start) * batch.length),)
        yield Pass(own, tokens, (rank,), LoraBackends())


def _spans(sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


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

    def use(self, segments: Sequence[LoraSegments]) -> None:
        """Sets the adapters' matrices of every linear."""
        for linear, own in zip(self.linears, segments, strict=True):
            linear.segments = own

    def segments(self, own: Pass, leaves: Sequence[Tensor] | None = None) -> list[LoraSegments]:
        """The adapters' matrices at each linear for a pass: from `leaves`, which receive gradients, or from
        the tables of all adapters."""
        matrices = iter(self._matrices(own) if leaves is None else leaves)
        return [
            LoraSegments(
                [
                    LoraSegment(span.start, span.stop, next(matrices), next(matrices), 1.0)
                    for span in own.tokens
                ],
                own.backends,
            )
            for _ in self.linears
        ]

    def leaves(self, own: Pass) -> list[Tensor]:
        """Parameters that train, in the order of `segments`."""
        return [matrix.detach().requires_grad_() for matrix in self._matrices(own)]

    def _matrices(self, own: Pass) -> Iterator[Tensor]:
        """A [rank, in] and B [out, rank] of each adapter of a pass, linear by linear."""
        for linear in self.linears:
            for ranks in own.ranks:
                yield linear.a[ranks]
                yield linear.b[ranks].view(-1, ranks.stop - ranks.start)


class Linear:
    """A frozen linear and the adapters beside it: tables [ranks, in] and [ranks, out], of which an adapter's
    lines hold its A [rank, in] and its B [out, rank]."""

    def __init__(self, module: nn.Linear, ranks: int) -> None:
        weight = module.weight.detach()
        self._placement: Placement = place_locally(weight, None)
        draws = torch.Generator().manual_seed(0)
        self.a, self.b = (
            _SPREAD * torch.randn(1, width, generator=draws).to(weight.dtype).repeat(ranks, 1)
            for width in reversed(weight.shape)
        )
        self.segments: LoraSegments | None = None
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)  # its bytes are elsewhere
        module.forward = self  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        if self.segments is None:
            return frozen(x, self._placement)
        if torch.is_grad_enabled():
            return bypassed(x, self._placement, self.segments)
        y = self._placement.forward(x)
        self.segments.add_(x.flatten(0, -2), y.flatten(0, -2))
        return y


class DecodeStep:
    """A call decodes one token for every row of a batch and returns the seconds that took."""

    def __init__(self, shared: SharedModel, batch: Batch, approach: str, context: int) -> None:
        self._shared = shared
        self._passes = [
            (shared.segments(own), Context(shared.shape, own.rows.stop - own.rows.start, context))
            for own in passes_of(batch, approach)
        ]

    @torch.no_grad()
    def __call__(self) -> float:
        seconds = 0.0
        for segments, context in self._passes:
            ids, cache = context.begin()
            self._shared.use(segments)
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
            self._shared.use(self._shared.segments(own, leaves))
            ids = self._ids[own.rows]
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started
