"""Row counts that a device's steps use: few, so that what is made once for a shape is used again."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RowBuckets:
    """Counts that rows are filled up to: all up to `exact`, multiples of `fine` up to `middle`, multiples of
    `coarse` beyond."""

    exact: int = 0
    fine: int = 1
    middle: int = 0
    coarse: int = 1

    def pad_rows(self, rows: int) -> int:
        """The next row count that is used, at least `rows`."""
        if rows <= self.exact:
            return rows
        grain = self.fine if rows <= self.middle else self.coarse
        return -(-rows // grain) * grain

    def whole_rows(self, rows: int) -> int:
        """The largest multiple of `coarse` up to `rows`, 0 where there is none."""
        return rows // self.coarse * self.coarse

    @property
    def most_padding(self) -> int:
        """Rows that `pad_rows` adds at most."""
        return max(self.fine, self.coarse) - 1


EXACT: Final = RowBuckets()  # every count is its own

# oneDNN builds code for every new shape of a product. On the CPU this was measured on one new number of rows
# took 0.3 to 0.5 ms and 0.65 MB for each product it met, and its cache holds few of them
# (`memory/compiled.py`): steps of freely chosen sizes paid that for good. Rows that fill a step up to the
# next count cost less.
ONEDNN: Final = RowBuckets(exact=8, fine=8, middle=64, coarse=32)
