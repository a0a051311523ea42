"""Scaling: instances come where queues are full, and go where they have been idle."""

from dataclasses import replace
from typing import Any

import pytest
from test_cluster_dispatch import at as placed
from test_cluster_dispatch import view

from coserve.cluster.records import BlockInstance
from coserve.cluster.scaling import AddInstance, DropInstance, ScalingSettings, scale
from coserve.errors import ConfigError


def at(*args: Any, **kwargs: Any) -> BlockInstance:
    return replace(placed(*args, **kwargs), most_queued=64)


def test_a_full_queue_brings_an_instance_and_half_of_the_pages() -> None:
    seen = view(at("a", "x", 33), at("b", "y", 1), c=100)
    pages = {("a", "x"): {1: 50, 2: 10, 3: 20, 4: 30}}
    assert scale(seen, pages, 0.0) == [AddInstance("x", "a", "c", (2, 3))]
    assert scale(view(at("a", "x", 32)), pages, 0.0) == [], "half of 64 rows is not above the bound"
    assert scale(seen, pages, 0.0, ScalingSettings(reserve=0.9)) == [], "nobody has room"


def test_the_fullest_first_and_one_block_a_worker() -> None:
    seen = view(at("a", "x", 40), at("a", "y", 60), b=900, c=0)
    assert scale(seen, {}, 0.0) == [AddInstance("y", "a", "c", ())]
    dead = dict(seen.workers) | {"c": replace(seen.workers["c"], is_alive=False)}
    assert scale(replace(seen, workers=dead), {}, 0.0) == []


def test_an_idle_instance_goes_if_another_takes_its_pages() -> None:
    seen = view(at("a", "x", idle=5.0), at("b", "x", 1), at("c", "y", idle=0.0))
    pages = {("a", "x"): {7: 100}}
    assert scale(seen, pages, 20.0) == []
    assert scale(seen, pages, 35.0) == [DropInstance("x", "a", "b", (7,))], "y has no other instance"
    assert scale(seen, {("a", "x"): {7: 700}}, 35.0) == [], "its pages would be lost"
    both = view(at("a", "x", idle=5.0), at("b", "x", idle=1.0))
    assert scale(both, {}, 99.0) == [DropInstance("x", "b", "a", ())], "one at a time"


def test_scaling_settings_have_ranges() -> None:
    for wrong in ({"full": 0.0}, {"idle": -1.0}, {"reserve": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ScalingSettings(**wrong)
