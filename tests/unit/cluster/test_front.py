"""Several passes under way through scripted workers: all tokens are right, whatever is drawn."""

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from scripted_links import FrontWorld

from coserve.cluster.front import Flight
from coserve.cluster.hosted import Outcome

THINGS = {"several", "deaths", "copied", "recomputed", "moved", "replaced", "states", "kept", "swept"}


def play(seeds: Iterable[int]) -> Counter[str]:
    """Worlds with several passes at once, deaths, tokens that were copied and recomputed, pages that moved
    before they were needed, blocks that moved, states that were copied, those that were kept, and pages that
    left an instance for others."""
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
        found.update(swept=world.swept)
        found.update(states=front.copied_states, kept=len(world.kept))
        found.update(copied=front.copied, recomputed=front.recomputed, moved=front.moved)
    return found


def test_some_worlds_of_the_front() -> None:
    assert set(+play(range(70))) == THINGS


def test_a_page_gets_a_new_owner_once_what_moves_into_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a copy that is late would be written over the new owner's rows."""
    front = FrontWorld(0, monkeypatch).front
    move = Flight((), torch.empty(0, 0), torch.empty(0, 0), [], frozenset({5}), tasks=1)
    front._moves.append(move)
    front._waiting[99] = move, (one for one in ())  # type: ignore[assignment]
    front.clean([6])
    assert not move.is_done and 99 in front._waiting
    front._outcomes.put(Outcome(99))
    front.clean([5])
    assert move.is_done and not front._waiting


@pytest.mark.slow
def test_a_thousand_worlds_of_the_front() -> None:
    assert set(+play(range(70, 1070))) == THINGS
