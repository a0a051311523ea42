"""Turns of offloaded sequences, against a list of who had a turn when."""

import random

import pytest

from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.schedule.offloading import OffloadTurns


@pytest.mark.parametrize("seed", range(8))
def test_the_offloaded_sequence_whose_last_turn_was_longest_ago_has_the_next_one(seed: int) -> None:
    """Sequences come and go, load or have no rows at times, and rest after they have read. Those that never
    had a turn come first, in their order."""
    draw = random.Random(seed)
    turns, rests_until, now = OffloadTurns(), 0.0, 0.0
    had: list[int] = []  # keys of all turns, the newest last
    chosen = set[int]()
    there = [made(draw, key) for key in range(6)]
    for key in range(6, 206):
        draw.shuffle(there)
        for one in there:
            one.loading = (1,) if draw.random() < 0.1 else ()
            one.computed = draw.choice([5, 9, 9, 10])
            one.pages = [1] if draw.random() < 0.5 else []
        others = [one for one in there if not one.offloaded and not one.loading]
        offloaded = {one.key for one in there if one.offloaded}
        # Ages count turns back from the newest one; a sequence that never had a turn is older than all.
        ready = [one.key for one in there if one.offloaded and one.computed < 10 and not one.loading]
        expected = offloaded
        if not others or not offloaded:
            expected = set()
        elif ready and (now >= rests_until or not any(one.pages for one in others)):
            ages = {one: had[::-1].index(one) if one in had else len(had) for one in ready}
            had.append(next(one for one in ready if ages[one] == max(ages.values())))
            expected = offloaded - {had[-1]}
            chosen.add(had[-1])
        assert turns.resting(there, now) == expected
        if draw.random() < 0.3:
            seconds = draw.choice([0.0, draw.uniform(0.0, 3.0)])
            turns.read(seconds, now)
            rests_until = max(rests_until, now) + seconds if seconds else rests_until
        now += draw.random()
        if draw.random() < 0.1:
            there[draw.randrange(len(there))] = made(draw, key)
    assert len(had) > 40 and len(chosen) > 4


def made(draw: random.Random, key: int) -> Sequence:
    return Sequence(key, Request("r", (1,) * 10), offloaded=draw.random() < 0.6)
