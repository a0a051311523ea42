"""Low-rank bypasses of many adapters beside one linear, each over its own rows: forward, and all gradients.

Neighbours of one shape that have as many rows each go through every product together, as one batched product;
others by themselves. Nobody's rows meet another's matrices, so what is not a number stays where it is. The
twin is `reference.lora`, one after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    def kind(self) -> tuple[object, ...]:
        """What segments have in common that are multiplied together."""
        return self.stop - self.start, self.a.shape, self.b.shape, self.scale, self.is_added


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbours: rows [start, stop), and which segments they are."""

    rows: slice
    segments: slice
    scale: float
    is_added: bool

    @property
    def count(self) -> int:
        count: int = self.segments.stop - self.segments.start
        return count

    def of(self, x: Tensor) -> Tensor:
        """Their rows of x [rows, width], [segments, rows of each, width]; two dimensions for one of them."""
        return x[self.rows] if self.count == 1 else x[self.rows].view(self.count, -1, x.shape[-1])

    def matrices(self, every: Sequence[Tensor]) -> Tensor:
        """Theirs among all segments', [segments, ...]; itself for one of them."""
        return every[self.segments.start] if self.count == 1 else torch.stack(list(every[self.segments]))

    def add_(self, y: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        """Their rows of y [rows, width] += alpha · left · right."""
        into = self.of(y)
        if self.count == 1:
            into.addmm_(left, right, alpha=alpha)
        else:
            into.baddbmm_(left, right, alpha=alpha)

    def each(self, found: Tensor) -> Sequence[Tensor]:
        """What a product gave, segment by segment."""
        return (found,) if self.count == 1 else found.unbind()


class Beside:
    """All segments at one linear, in the order of their rows."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.a = [segment.a for segment in segments]
        self.b = [segment.b for segment in segments]
        self.is_added = all(segment.is_added for segment in segments)
        self._groups = list(_groups(segments))

    def add_(self, x: Tensor, y: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """y [rows, out] += scale · x Aᵀ Bᵀ, in place, where it is not in there; x [rows, in]."""
        for group in self._groups:
            if not group.is_added:
                h = group.of(x) @ group.matrices(a).mT
                group.add_(y, h, group.matrices(b).mT, group.scale)

    def back(
        self, grad: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], into: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of all a and all b, given grad [rows, out] of what came out; that of x [rows, in] is
        added to `into`, where it is wanted."""
        of_a: list[Tensor] = []
        of_b: list[Tensor] = []
        for group in self._groups:
            given, own, down, up = group.of(grad), group.of(x), group.matrices(a), group.matrices(b)
            between = (given @ up).mul_(group.scale)
            if into is not None:
                group.add_(into, between, down, 1.0)
            of_a += group.each(between.mT @ own)
            of_b += group.each(given.mT @ (own @ down.mT).mul_(group.scale))
        return of_a, of_b


def _groups(segments: Sequence[Segment]) -> Iterator[_Group]:
    """Neighbours that touch and are of one kind, together."""
    first = 0
    for number, segment in enumerate(segments):
        following = segments[number + 1] if number + 1 < len(segments) else None
        if following is None or following.start != segment.stop or following.kind != segment.kind:
            rows = slice(segments[first].start, segment.stop)
            yield _Group(rows, slice(first, number + 1), segment.scale, segment.is_added)
            first = number + 1
