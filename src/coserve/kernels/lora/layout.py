"""Layouts of rows and ranks: the block structure between adapters' two matrices.

Adapters' matrices are concatenated, A in [ranks, in] and B transposed in [ranks, out]. A *segment* is a range
of rows of one adapter. Of the product of all rows with all ranks only the blocks (rows of a segment x ranks
of its adapter) are computed, so that a NaN in one adapter, or in its rows, stays there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments in row order, without overlaps: `rows[i]` belong to adapter `owners[i]`, with ranks
    `ranks[owners[i]]`. Rows may have no segment."""

    rows: tuple[slice, ...]
    owners: tuple[int, ...]
    ranks: tuple[slice, ...]

    @staticmethod
    def of(segments: Sequence[tuple[slice, int]], ranks: Sequence[int]) -> "Layout":
        """Layout of segments (rows, adapter), where adapter `i` has rank `ranks[i]`."""
        ends = list(accumulate(ranks))
        spans = tuple(slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True))
        ordered = sorted(segments, key=lambda segment: segment[0].start)
        return Layout(tuple(rows for rows, _ in ordered), tuple(owner for _, owner in ordered), spans)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Iterates over the blocks: (rows, ranks)."""
        return ((rows, self.ranks[owner]) for rows, owner in self.segments)

    @property
    def segments(self) -> tuple[tuple[slice, int], ...]:
        """Segments as (rows, adapter)."""
        return tuple(zip(self.rows, self.owners, strict=True))

    @property
    def total_ranks(self) -> int:
        return self.ranks[-1].stop if self.ranks else 0
