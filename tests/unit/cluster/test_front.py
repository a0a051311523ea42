"""Several passes under way through scripted workers: all tokens are right, whatever is drawn."""

from collections import Counter
from collections.abc import Iterable

import pytest
from scripted_links import FrontWorld

THINGS = {"several", "deaths", "copied", "recomputed", "moved", "replaced"}


def play(seeds: Iterable[int]) -> Counter[str]:
    """Worlds with several passes at once, deaths, tokens that were copied and recomputed, pages that moved
    before they were needed, and blocks that moved."""
    found: Counter[str] = Counter()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            world = FrontWorld(seed, patch)
            try:
                world.run()
            except Exception as error:
                raise AssertionError(f"world {seed}") from error
        front = world.front
        found.update(several=world.most_open > 1, deaths=world.deaths, replaced=world.replaced)
        found.update(copied=front.copied, recomputed=front.recomputed, moved=front.moved)
    return found


def test_some_worlds_of_the_front() -> None:
    assert set(+play(range(70))) == THINGS


@pytest.mark.slow
def test_a_thousand_worlds_of_the_front() -> None:
    assert set(+play(range(70, 1070))) == THINGS
