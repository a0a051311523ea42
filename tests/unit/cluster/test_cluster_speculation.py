"""Speculation between workers: where, what is right, and that nothing wrong is passed on."""

import random
from itertools import pairwise, product

import pytest

from coserve.cluster.speculation import (
    RowsAhead,
    SpeculationStep,
    bottlenecks,
    similarity,
    speculated_places,
)
from coserve.errors import ConfigError


def test_the_slowest_instances_are_bottlenecks() -> None:
    seconds = {("a", str(n)): float(n % 7) for n in range(20)}
    found = bottlenecks(seconds)
    assert found == [("a", "13"), ("a", "6")]
    assert bottlenecks({("a", "x"): 0.0}) == [], "who has nothing to do is none"
    with pytest.raises(ConfigError, match="share"):
        bottlenecks(seconds, 0.0)


def test_places_are_never_neighbours_nor_the_last() -> None:
    draw = random.Random(4)
    found_any = 0
    for _ in range(200):
        chain = [(draw.choice("ab"), draw.choice("xyz")) for _ in range(draw.randint(1, 8))]
        slowest = draw.sample([*product("ab", "xyz")], 4)
        places = speculated_places(chain, slowest, "xy", True)
        found_any += len(places)
        assert len(chain) - 1 not in places
        assert all(after - before > 1 for before, after in pairwise(places))
        assert all(chain[place] in slowest and chain[place][1] in "xy" for place in places)
        assert speculated_places(chain, slowest, "xy", False) == []
    assert found_any > 50
    chain = [("a", "x"), ("b", "y"), ("a", "z")]
    assert speculated_places(chain, [("b", "y"), ("a", "x")], "xy", True) == [1], (
        "the slower of two neighbours"
    )


def test_similarity_is_a_cosine() -> None:
    assert similarity([1.0, 0.0], [3.0, 0.0]) == 1.0 and similarity([1.0, 0.0], [0.0, 2.0]) == 0.0
    assert similarity([3.0, 4.0], [4.0, 3.0]) == pytest.approx(0.96)
    assert similarity([0.0], [1.0]) == 0.0 and similarity([float("nan")], [1.0]) == 0.0
    with pytest.raises(ConfigError, match="1 numbers, and the block's output 2"):
        similarity([1.0], [1.0, 2.0])


def test_every_order_of_events_ends_in_one_decision() -> None:
    """A wrong prediction is never passed on, and one that is late is of use where it holds."""
    orders = ("come", "compute", "verify"), ("come", "verify", "compute"), ("verify", "come", "compute")
    for cosine, order in product((0.95, 0.9499, float("nan")), orders):
        ahead, said = RowsAhead(), []
        for event in order:
            if event == "come":
                assert ahead.came() is (order[0] == "come" or cosine == 0.95)
            elif event == "verify":
                said.append(ahead.verified(cosine))
            elif ahead.has_come:
                said.append(ahead.computed())
        decided = [one for one in said if one is not SpeculationStep.WAIT]
        assert decided == [SpeculationStep.PASS_ON if cosine == 0.95 else SpeculationStep.COMPUTE_AGAIN]
        assert ahead.is_wrong is (order[0] == "come" and cosine != 0.95)
