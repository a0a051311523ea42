"""Rows of a pass in tiles, for kernels in a CUDA graph: the device alone knows whose rows are where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

LARGEST: Final = 16  # rows of a tile: the least that matrix units multiply


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile i has `counts[i]` rows, at most `LARGEST`, from `starts[i]` on: neighbours of one sequence, whose
    positions follow each other. One of no rows is nobody's. `lines` [rows] are the rows' lines of a block
    table."""

    starts: Tensor
    counts: Tensor
    lines: Tensor


def most_tiles(rows: int, sequences: int) -> int:
    """Tiles that hold so many rows of at most so many sequences, however they are divided among these."""
    return rows // LARGEST + min(rows, sequences)


def list_tiles(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """First rows and numbers of rows of the tiles of sequences with `counts` rows each, one after the
    other."""
    starts, sizes, first = list[int](), list[int](), 0
    for count in counts:
        starts += range(first, first + count, LARGEST)
        sizes += [min(LARGEST, count - begin) for begin in range(0, count, LARGEST)]
        first += count
    return starts, sizes
