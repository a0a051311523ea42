"""Placement: against all assignments tried, and when instances move."""

import random
from itertools import product

import pytest
from test_cluster_dispatch import PROFILE

from coserve.cluster.placement import (
    DependenceCounter,
    PlacementSettings,
    PlacementTask,
    moves_between,
    place_by_fragmentation,
    place_by_locality,
)
from coserve.cluster.records import ClusterBlock, ClusterWorker
from coserve.errors import ConfigError


def task(draw: random.Random, blocks: int = 5, workers: int = 3) -> PlacementTask:
    names = [f"b{n}" for n in range(blocks)]
    return PlacementTask(
        {name: ClusterBlock(name, draw.choice((100, 200, 300)), 1, 1, PROFILE) for name in names},
        {f"w{n}": ClusterWorker(f"w{n}", f"h{n // 2}", 700, 0, 1.0, 1.0, 1.0) for n in range(workers)},
        {(a, b): draw.choice((0.0, 1.0, 50.0)) for a in names for b in names if a < b},
        {name: draw.choice((0.1, 0.2)) for name in names},
        PlacementSettings(reserve=0.0, spread=1.5),
    )


def test_placements_are_near_the_best_of_all() -> None:
    draw = random.Random(5)
    best = ratio = 0
    for _ in range(40):
        one = task(draw)
        options = [
            dict(zip(one.blocks, where, strict=True))
            for where in product(one.workers, repeat=len(one.blocks))
        ]
        fitting = [option for option in options if one.fits(option)]
        found = place_by_locality(one)
        if found is None:
            assert place_by_fragmentation(one) is None
            continue
        least = min(map(one.cost, fitting))
        assert one.fits(found) and one.cost(found) >= least
        best += one.cost(found) == pytest.approx(least)
        ratio = max(ratio, one.cost(found) / least if least else 1.0)
        packed = place_by_fragmentation(one)
        assert packed is None or (one.fits(packed) and one.cost(found) <= one.cost(packed))
    assert best >= 36 and ratio <= 1.5, (best, ratio)


def test_chains_stay_on_a_host() -> None:
    """Two chains of three blocks, two hosts of two workers each: no row crosses."""
    names = [f"{chain}{n}" for chain in "pq" for n in range(3)]
    own = PlacementTask(
        {name: ClusterBlock(name, 100, 1, 1, PROFILE) for name in names},
        {f"w{n}": ClusterWorker(f"w{n}", f"h{n // 2}", 220, 0, 1.0, 1.0, 1.0) for n in range(4)},
        {(f"{chain}{n}", f"{chain}{n + 1}"): 10.0 for chain in "pq" for n in range(2)},
        dict.fromkeys(names, 1.0),
        PlacementSettings(reserve=0.0, spread=2.0),
    )
    found = place_by_locality(own)
    assert found is not None and own.between_hosts(found) == 0.0
    assert own.cost(dict.fromkeys(("p0", "p1"), "w0") | {"p2": "w1"}) == pytest.approx(0.05 * 10.0), (
        "one host"
    )
    packed = place_by_fragmentation(own)
    assert packed is not None and own.between_hosts(packed) > 0.0
    full = PlacementTask(own.blocks, {"w0": own.workers["w0"]}, own.traffic, own.loads, own.settings)
    assert place_by_locality(full) is None is place_by_fragmentation(full)


def test_traffic_fades_and_instances_follow_it() -> None:
    counter = DependenceCounter(10.0)
    counter.note("b", "a", 800.0, 0.0)
    counter.note("a", "a", 1e9, 0.0)
    assert counter.traffic(10.0) == {("a", "b"): 400.0}
    counter.note("a", "c", 4000.0, 10.0)
    assert counter.traffic(10.0 + 10 * 12) == {}
    blocks = {name: ClusterBlock(name, 500, 1, 1, PROFILE) for name in "abc"}
    workers = {w: ClusterWorker(w, w, 1000, 0, 1.0, 1.0, 1.0) for w in ("v", "w")}
    placed = {"a": "v", "b": "v", "c": "w"}

    def moves(between: float) -> list[tuple[str, str]]:
        traffic = {("a", "c"): between, ("a", "b"): 1.0}
        own = PlacementTask(blocks, workers, traffic, {}, PlacementSettings(reserve=0.0))
        wanted = place_by_locality(own)
        assert wanted is not None and wanted["a"] == wanted["c"] != wanted["b"]
        return moves_between(own, placed, {"a": "w", "b": "v", "c": "w"})

    assert moves(200.0) == [("a", "w")], "800 bytes saved are worth 500 that move"
    assert moves(20.0) == []


def test_placement_settings_have_ranges() -> None:
    for wrong in ({"spread": 0.5}, {"reserve": 1.0}, {"horizon": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PlacementSettings(**wrong)
