"""The modelled cluster of BlockLLM's paper: what settings share, and figures that can be computed apart."""

import json
import operator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from coserve.cluster.meeting import MovingPages, PageMove, plan_move
from coserve.cluster.records import ClusterLink
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.simulation.clustered.setting import ClusterAsk, ClusterSample
from coserve_benchmarks.simulation.papers import blockllm_cluster
from coserve_benchmarks.simulation.papers import blockllm_figures as figures
from coserve_benchmarks.simulation.papers.blockllm_cluster import (
    costs,
    make_asks,
    meeting_seconds,
    most_rate,
    placements,
    play,
    setting,
    speculated,
    unlinked,
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
    none, ours, ideal = speculated(2.0)
    assert 0.8 < ours.p50 / none.p50 < 0.97 and ideal.p50 <= ours.p50


def test_figures_are_of_the_runs(tmp_path: Path) -> None:
    """Series of a short load agree with its outcomes, and all figures are drawn of them."""
    kinds, samples = {}, {}
    asks = make_asks(6.0, 1.0)
    for kind in ("adaptive", "models"):
        seen: list[ClusterSample] = samples.setdefault(kind, [])
        kinds[kind] = play(replace(setting(kind), look=0.1), asks, seen.append)
    adapted = replace(kinds["adaptive"], stood_in=(0.3, 0.0, 0.0, 0.75, 0.1, 0.0))
    series = {
        **figures.distributions(kinds),
        **figures.provisions(kinds, samples, 3),
        **figures.growth({3: kinds["adaptive"]}, {3: kinds["models"]}),
        **figures.ablations(kinds, {"locality, 0": kinds["models"]}, speculated(0.5)),
        **figures.adaptation(samples["adaptive"], asks),
        **figures.similarities({6.0: adapted, 2.0: kinds["models"]}),
    }
    assert {*series} == {f"blockllm.fig{number}" for number in (16, *range(18, 27))}
    shares = adapted.stood_in
    drawn = series["blockllm.fig23"]
    assert [row[2] for row in drawn] == [(n + 1) / len(drawn) for n in range(len(drawn))]
    assert {(row[0], row[1]) for row in drawn} == {(6.0, len(drawn) / len(shares))}
    assert [row[3] for row in drawn] == sorted(map(figures.similarity_of, filter(None, shares)))
    for kind, one in kinds.items():
        own = [row for row in series["blockllm.fig18"] if row[0] == kind]
        assert (own[0][2], own[-1][2]) == (min(one.latencies), max(one.latencies))
        busy = [row[2] for row in series["blockllm.fig20"] if row[0] == kind]
        spans = [later.at - one.at for one, later in pairwise(samples[kind])]
        computed = samples[kind][-1].computed - samples[kind][0].computed
        assert sum(map(operator.mul, busy, spans)) * 3 == pytest.approx(computed)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in busy)
    blocks = {row[0]: row[1] for row in series["blockllm.fig21"]}
    assert blocks["adaptive"] == pytest.approx(5 * costs().shape.parameters * 2 / 1e9, rel=0.01), "3 + 2"
    assert blocks["models"] == pytest.approx(12 * costs().shape.parameters * 2 / 1e9, rel=0.01)
    assert sum(row[1] for row in series["blockllm.fig16"]) * 0.1 <= len(asks)
    assert all(0.0 <= row[2] <= 1.0 for row in series["blockllm.fig16"])
    assert sum(one.stand_in_rows for one in samples["models"]) == 0
    assert sorted(figures.rising(asks, 1.0), key=asks.index) == figures.rising(asks, 1.0) != asks
    (tmp_path / "cluster.json").write_text(json.dumps({"series": series}))
    redraw(tmp_path / "cluster.json", tmp_path / "cluster.svg")
    drawn = (tmp_path / "cluster.svg").read_text()
    assert all(f"(figure {number})" in drawn for number in (16, 18, 22, 23, 26))


def test_no_policy_exceeds_the_most_that_a_load_allows() -> None:
    alone = [ClusterAsk(2.0, "application-0", 50, 8)]
    block = costs().block("all", 0, 1).profile
    seconds = block.seconds(50) + 7 * block.seconds(1)
    assert most_rate(alone) == pytest.approx(8 / seconds)
    many = alone * 900
    rows = 900 * 57 * (block.seconds(2) - block.seconds(1))
    assert most_rate(many) == pytest.approx(900 * 8 / (rows / 3)) == pytest.approx(3 * most_rate(many, 1))
    asks = make_asks(40.0, 0.2)
    found = play(unlinked(setting("blocks")), asks)
    assert 0.5 * most_rate(asks) < found.rate <= most_rate(asks) and not found.between_nbytes


def test_similarity_follows_the_share_of_stand_ins() -> None:
    found = [figures.similarity_of(share) for share in (0.0, 0.0835, 0.348, 0.642, 0.9)]
    assert found == pytest.approx([1.0, 0.986, 0.923, 0.660, 0.660])


@pytest.mark.slow  # a minute of one core
def test_all_bars_have_rows() -> None:
    found = blockllm_cluster.run(True, lambda text: None)
    assert {key for key in BARS if key.startswith("cluster.")} == {*found.rows}
    assert play(setting("models", 3), make_asks(2.0, 1.0, 3)).adapted == 0
