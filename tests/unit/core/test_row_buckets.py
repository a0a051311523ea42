"""Row counts in use: few, never less than asked for, and not much more."""

import random

import pytest

from coserve.core.row_buckets import EXACT, ONEDNN, RowBuckets


def test_counts_are_enough_few_and_stay_where_they_are() -> None:
    used = {ONEDNN.pad_rows(rows) for rows in range(1, 1025)}
    assert all(ONEDNN.pad_rows(rows) >= rows for rows in range(1, 1025))
    assert len(used) <= 8 + 7 + 30
    assert all(ONEDNN.pad_rows(rows) == rows for rows in used)


@pytest.mark.parametrize(("rows", "used"), [(1, 1), (7, 7), (8, 8), (9, 16), (64, 64), (65, 96), (513, 544)])
def test_small_counts_stay_exact_and_large_ones_are_coarse(rows: int, used: int) -> None:
    assert ONEDNN.pad_rows(rows) == used
    assert used <= 64 or used % ONEDNN.coarse == 0


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_never_more_than_told_and_whole_rows_are_padded_by_nothing(seed: int) -> None:
    draws = random.Random(seed)
    exact, fine, coarse = (draws.randint(1, 40) for _ in range(3))
    buckets = RowBuckets(exact, fine, exact + fine * draws.randint(1, 5), coarse)
    added = [buckets.pad_rows(rows) - rows for rows in range(1, 2000)]
    assert min(added) == 0 and max(added) <= buckets.most_padding
    for rows in range(buckets.middle + coarse, 2000):
        whole = buckets.whole_rows(rows)
        assert rows - coarse < whole <= rows and buckets.pad_rows(whole) == whole


def test_without_buckets_every_count_is_its_own() -> None:
    assert all(EXACT.pad_rows(rows) == EXACT.whole_rows(rows) == rows for rows in range(1000))
    assert EXACT.most_padding == 0
