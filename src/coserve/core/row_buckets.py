"""Row buckets: steps use few different row counts, so that code compiled for a shape is used again.

oneDNN builds code for every new shape of a product. On the CPU this was measured on one new number of rows
took 0.3 to 0.5 ms and 0.65 MB for each product it met, and its cache holds few of them
(`memory/compiled.py`): steps of freely chosen sizes paid that for good. Rows that fill a step up to the
next count cost less.
"""

COARSE = 32  # rows: what large counts are multiples of
_FINE = 8
_EXACT, _MIDDLE = 8, 64  # up to these: any count, multiples of `_FINE`


def pad_rows(rows: int) -> int:
    """The smallest row count in use that is at least `rows`."""
    if rows <= _EXACT:
        return rows
    grain = _FINE if rows <= _MIDDLE else COARSE
    return -(-rows // grain) * grain
