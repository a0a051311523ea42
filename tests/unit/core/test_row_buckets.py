"""Row counts in use: few, never less than asked for, and not much more."""

import pytest

from coserve.core.row_buckets import COARSE, pad_rows


def test_counts_are_enough_few_and_stay_where_they_are() -> None:
    used = {pad_rows(rows) for rows in range(1, 1025)}
    assert all(pad_rows(rows) >= rows for rows in range(1, 1025))
    assert len(used) <= 8 + 7 + 30
    assert all(pad_rows(rows) == rows for rows in used)


@pytest.mark.parametrize(("rows", "used"), [(1, 1), (7, 7), (8, 8), (9, 16), (64, 64), (65, 96), (513, 544)])
def test_small_counts_stay_exact_and_large_ones_are_coarse(rows: int, used: int) -> None:
    assert pad_rows(rows) == used
    assert used <= 64 or used % COARSE == 0
