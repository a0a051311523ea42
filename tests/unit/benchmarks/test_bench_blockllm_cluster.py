"""The modelled cluster of BlockLLM's paper: what settings share, and figures that can be computed apart."""

import pytest

from coserve.cluster.meeting import MovingPages, PageMove, plan_move
from coserve.cluster.records import ClusterLink
from coserve_benchmarks.simulation.papers import blockllm_cluster
from coserve_benchmarks.simulation.papers.blockllm_cluster import (
    costs,
    make_asks,
    meeting_seconds,
    placements,
    play,
    setting,
    speculated,
)
from coserve_benchmarks.simulation.run import BARS


def test_costs_are_those_of_the_whole_model() -> None:
    own = costs()
    whole, parts = own.block("all", 0, 1), [own.block(str(place), place) for place in range(4)]
    for rows in (1, 16, 256):
        assert sum(one.profile.seconds(rows) for one in parts) == pytest.approx(whole.profile.seconds(rows))
    assert sum(one.token_nbytes for one in parts) == whole.token_nbytes == own.page_nbytes == 16 * 2048
    assert whole.profile.seconds(256) == pytest.approx(0.15, rel=0.25), "a prompt of 256 tokens, as measured"


def test_settings_share_what_they_say() -> None:
    chains = {kind: setting(kind).chains for kind in ("blocks", "adaptive", "merged", "models")}
    assert len({*chains["models"].values()}) == 12 and len({*chains["blocks"].values()}) == 3
    assert {len(chain) for chain in chains["merged"].values()} == {1}
    equivalents = [one for one in setting("adaptive").blocks.values() if one.equivalents]
    assert len(equivalents) == 6 and not any(one.equivalents for one in setting("blocks").blocks.values())


def test_chunks_of_pages_meet_near_the_plan() -> None:
    move = PageMove(2048, 32768, 16, ClusterLink(125e6, 2e-4), 1700.0)
    found = {way: meeting_seconds(move, way) for way in MovingPages}
    for way, seconds in found.items():
        assert plan_move(move, way).seconds <= seconds <= 1.05 * plan_move(move, way).seconds
    assert found[MovingPages.MEET] < 0.75 * min(found[MovingPages.COPY], found[MovingPages.RECOMPUTE])


def test_locality_and_speculation_save_what_is_waited_for() -> None:
    found = placements(0.5)
    near, far = (
        sum(one.between_nbytes for name, one in found.items() if kind in name) for kind in ("loc", "frag")
    )
    assert 0 < near < 0.7 * far
    none, ours = speculated(2.0)
    assert 0.8 < ours / none < 0.97


@pytest.mark.slow  # a minute of one core
def test_all_bars_have_rows() -> None:
    found = blockllm_cluster.run(True, lambda text: None)
    assert {key for key in BARS if key.startswith("cluster.")} == {*found.rows}
    assert play(setting("models", 3), make_asks(2.0, 1.0, 3)).adapted == 0
