"""Levels of keys, against the sums of all seconds that they had."""

import math
import random

import pytest

from coserve.split.key_shares import FADE_SECONDS, SLACK_SECONDS, KeyShare, compare


@pytest.mark.parametrize("seed", range(8))
def test_a_level_is_the_excess_over_every_other_key_that_competes(seed: int) -> None:
    """In whole units, and only for a key with several calls. What a key had fades from when it had it."""
    draw = random.Random(seed)
    levels = set[int]()
    for _ in range(100):
        now, shares = 0.0, [KeyShare() for _ in range(draw.randint(1, 5))]
        had: dict[KeyShare, list[tuple[float, float]]] = {share: [] for share in shares}
        for _ in range(draw.randint(0, 20)):
            now += draw.random() * draw.choice([0.01, 0.5])
            share, seconds = draw.choice(shares), draw.random()
            share.add(seconds, now)
            had[share].append((seconds, now))
        now += draw.random() * 0.5
        faded = {
            share: sum(seconds * math.exp((at - now) / FADE_SECONDS) for seconds, at in given)
            for share, given in had.items()
        }
        calls = {share: draw.randint(1, 3) for share in draw.sample(shares, draw.randint(1, len(shares)))}
        compare(calls, now)
        for share in calls:
            others = [other for other in calls if other is not share]
            level = 0
            while others and calls[share] > 1:
                if any(faded[share] - faded[other] < (level + 1) * SLACK_SECONDS for other in others):
                    break
                level += 1
            assert share.level == level
            levels.add(level)
    assert len(levels) > 5
