"""Row buckets: the few row counts of a device's steps, so that code cached by shape is reused."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RowBuckets:
    """Row counts to pad to: any up to `exact`, multiples of `fine` up to `middle`, multiples of `coarse`
    beyond."""

    exact: int = 0
    fine: int = 1
    middle: int = 0
    coarse: int = 1

    def pad_rows(self, rows: int) -> int:
        """The smallest bucket of at least `rows` rows."""
        if rows <= self.exact:
            return rows
        grain = self.fine if rows <= self.middle else self.coarse
        return -(-rows // grain) * grain

    def whole_rows(self, rows: int) -> int:
        """The largest multiple of `coarse` up to `rows`, 0 where there is none."""
        return rows // self.coarse * self.coarse

    @property
    def most_padding(self) -> int:
        """The most rows that `pad_rows` adds."""
        return max(self.fine, self.coarse) - 1


# Rows of passes with prompts, and of windows of training, that a graph holds: at most half of them are
# padding, a third from 256 rows on.
# Up to the first the weights' bytes take longer than the rows' products (128 rows of 8B on an H200: 2.4 ms of
# products, 3.5 of reading). 640 are a prompt of 512, the most beside bounds, and decode rows.
GRAPHS: Final = (128, 256, 384, 512, 640, 768, 1024, 1536, 2048)


def graph_rows(rows: int) -> int | None:
    """The rows of the smallest graph that holds a pass with prompts, or a window; None where none does."""
    return GRAPHS[bisect_left(GRAPHS, rows)] if rows <= GRAPHS[-1] else None


EXACT: Final = RowBuckets()  # every count is its own

# oneDNN builds code for every new shape of a product. On the CPU this was measured on one new number of rows
# took 0.3 to 0.5 ms and 0.65 MB for each product it met, and its cache holds few of them
# (`memory/compiled.py`): steps of freely chosen sizes paid that for good. Rows that fill a step up to the
# next count cost less.
ONEDNN: Final = RowBuckets(exact=8, fine=8, middle=64, coarse=32)
