"""Drawn interleavings of dispatch, migration, scaling, speculation and death: all tokens right, all accounts
exact, and each of these things did happen."""

from collections import Counter
from collections.abc import Iterable

import pytest
from scripted_cluster import ScriptedCluster

THINGS = {
    "moved", "lost", "wrong", "right", "AddInstance", "DropInstance", "swept", "died", "proactive", "placed",
}  # fmt: skip


def play(seeds: Iterable[int]) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        world = ScriptedCluster(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"world {seed}") from error
        happened.update(world.happened)
    return happened


def test_some_worlds() -> None:
    assert set(play(range(120))) >= THINGS


@pytest.mark.slow
def test_a_thousand_worlds() -> None:
    assert set(play(range(120, 1120))) >= THINGS
