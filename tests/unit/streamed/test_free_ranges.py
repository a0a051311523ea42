import secrets
from random import Random

import pytest

from coserve.streamed.free_ranges import FreeRanges, Range


def bytes_of(ranges: list[Range]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


@pytest.mark.parametrize("most", [None, 60])
def test_nothing_is_handed_out_twice_and_nothing_is_lost(most: int | None) -> None:
    """Beside a set of bytes that does the same."""
    for _ in range(50):
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        draws, it = Random(seed), FreeRanges(most)
        held: list[list[Range]] = []
        for _ in range(200):
            used = sum(len(bytes_of(ranges)) for ranges in held)
            assert it.used == used
            if held and draws.random() < 0.45:
                for one in held.pop(draws.randrange(len(held))):
                    it.give(one)
                continue
            wanted = draws.randint(1, 15)
            taken = it.take(wanted)
            if taken is None:
                assert most is not None and used + wanted > most, "there was room"
                continue
            assert most is None or used + wanted <= most
            assert sum(end - start for start, end in taken) == len(bytes_of(taken)) == wanted
            assert all(bytes_of(taken).isdisjoint(bytes_of(other)) for other in held)
            assert most is None or max(bytes_of(taken)) < most
            assert most is not None or len(taken) == 1, "whole, where the end is open"
            held.append(taken)
        for ranges in held:
            for one in ranges:
                it.give(one)
        assert (it.used, it.end) == (0, 0)


def test_the_smallest_range_that_fits_is_taken() -> None:
    it = FreeRanges()
    taken = [it.take(count) for count in (8, 1, 4, 1, 6)]
    for place in (0, 2):
        assert taken[place] is not None
        it.give(taken[place][0])
    assert it.take(3) == [(9, 12)]
    assert it.take(5) == [(0, 5)] and it.take(4) == [(20, 24)]


def test_what_is_in_pieces_is_taken_in_pieces_only_at_the_limit() -> None:
    it = FreeRanges(12)
    taken = [it.take(3) for _ in range(4)]
    for place in (0, 2):
        assert taken[place] is not None
        it.give(taken[place][0])
    assert it.take(5) == [(0, 3), (6, 8)]
    assert it.take(2) is None and it.take(1) == [(8, 9)]
