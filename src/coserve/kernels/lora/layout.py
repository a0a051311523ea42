"""Which rows meet which ranks: the shape of what lies between an adapter's two matrices.

Adapters' matrices lie end to end, A in [ranks, in] and B transposed in [ranks, out], each adapter with as
many ranks as it has. A *segment* is a range of rows that belongs to one adapter. Of the product of all rows
with all ranks only the blocks (rows of a segment x ranks of its adapter) exist; the rest is never computed,
so that what is not a number in one adapter, or in its rows, stays there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments in the order of their rows, none of which overlap: `rows[i]` belong to adapter `owners[i]`,
    whose ranks are `ranks[owners[i]]`. Rows that no segment has belong to nobody."""

    rows: tuple[slice, ...]
    owners: tuple[int, ...]
    ranks: tuple[slice, ...]

    @staticmethod
    def of(segments: Sequence[tuple[slice, int]], ranks: Sequence[int]) -> "Layout":
        """Of (rows, adapter), where adapter `i` has `ranks[i]` ranks."""
        ends = list(accumulate(ranks))
        spans = tuple(slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True))
        ordered = sorted(segments, key=lambda segment: segment[0].start)
        return Layout(tuple(rows for rows, _ in ordered), tuple(owner for _, owner in ordered), spans)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """The blocks: (rows, ranks)."""
        return ((rows, self.ranks[owner]) for rows, owner in self.segments)

    @property
    def segments(self) -> tuple[tuple[slice, int], ...]:
        """(rows, adapter)."""
        return tuple(zip(self.rows, self.owners, strict=True))

    @property
    def total_ranks(self) -> int:
        return self.ranks[-1].stop if self.ranks else 0
