"""Low-rank bypasses of many adapters beside one linear, each over its own rows: forward, and all gradients.

Matrices that lie apart are laid end to end and multiplied in whichever way `dispatch` has for such segments,
ranks of any size and rows of any number; one alone has two products of its own. Nobody's rows meet another's
matrices, so what is not a number stays where it is. The twins are `reference.multi_lora` and
`multi_lora_backward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.dispatch import make_way
from coserve.kernels.layout import Layout
from coserve.kernels.many import Way


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of an adapter with a [rank, in] and b [out, rank], times `scale`. `is_added`: what
    they are added to has it already, and forward there is nothing to do."""

    start: int
    stop: int
    a: Tensor
    b: Tensor
    scale: float
    is_added: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


# By spans of rows, and ranks: what the linears that the same rows pass have in common.
Ways = dict[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], Way]


class Beside:
    """All segments at one linear, in the order of their rows. Methods are given the matrices once more: in a
    graph those are others, of the same numbers. `ways` are taken from, and added to."""

    def __init__(self, segments: Sequence[Segment], ways: Ways) -> None:
        self._segments, self._ways = segments, ways
        self._left = [i for i, segment in enumerate(segments) if not segment.is_added]
        self.a = [segment.a for segment in segments]
        self.b = [segment.b for segment in segments]

    @property
    def is_added(self) -> bool:
        """Tells whether forward there is nothing to do."""
        return not self._left

    def add_(self, x: Tensor, y: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """y [rows, out] += scale · x Aᵀ Bᵀ, in place, where it is not in there; x [rows, in]."""
        left = [self._segments[i] for i in self._left]
        if len(left) == 1:
            (i,), (own,) = self._left, left
            y[own.rows].addmm_(x[own.rows] @ a[i].t(), b[i].t(), alpha=own.scale)
        elif left:
            way = self._way(left, x)
            down, up = _end_to_end(left, [a[i] for i in self._left], [b[i] for i in self._left])
            way.expand_(way.shrink(x, down), up, y)

    def back(
        self, grad: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], into: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Gradients of all a and all b, given grad [rows, out] of what came out; that of x [rows, in] is
        added to `into`, where it is wanted."""
        if len(self._segments) == 1:
            return self._back_alone(grad, x, a[0], b[0], into)
        way = self._way(self._segments, x)
        down, up = _end_to_end(self._segments, a, b)
        between = way.shrink(grad, up)
        if into is not None:
            way.expand_(between, down, into)
        ranks = [len(matrix) for matrix in a]
        of_up = torch.split(way.outer(way.shrink(x, down), grad), ranks)
        of_b = [found.t() * own.scale for own, found in zip(self._segments, of_up, strict=True)]
        return torch.split(way.outer(between, x), ranks), of_b

    def _way(self, segments: Sequence[Segment], x: Tensor) -> Way:
        spans = tuple((segment.start, segment.stop) for segment in segments)
        key = spans, tuple(len(segment.a) for segment in segments)
        if key not in self._ways:
            layout = Layout.of([(segment.rows, i) for i, segment in enumerate(segments)], key[1])
            self._ways[key] = make_way(layout, len(x), x.device)
        return self._ways[key]

    def _back_alone(
        self, grad: Tensor, x: Tensor, a: Tensor, b: Tensor, into: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        (own,) = self._segments
        grad, x = grad[own.rows], x[own.rows]
        between = (grad @ b).mul_(own.scale)
        if into is not None:
            into[own.rows].addmm_(between, a)
        return (between.t() @ x,), (grad.t() @ (x @ a.t()).mul_(own.scale),)


def _end_to_end(
    segments: Sequence[Segment], a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """A [all ranks, in], and B transposed and times its scale [all ranks, out]."""
    up = [matrix.t() * own.scale for own, matrix in zip(segments, b, strict=True)]
    return torch.cat(list(a)), torch.cat(up)
