"""The simulated cluster: seconds that can be counted by hand, accounts that are exact, and what policies
change."""

from dataclasses import replace

import pytest

from coserve.cluster.dispatch import SCHEDULER, DispatchRule, DispatchSettings
from coserve.cluster.records import ClusterBlock, ClusterLink, ClusterWorker
from coserve.cluster.scaling import ScalingSettings
from coserve.errors import ConfigError
from coserve_benchmarks.simulation.clustered.setting import (
    ClusterAsk,
    ClusterSample,
    ClusterSetting,
    linear_profile,
)
from coserve_benchmarks.simulation.clustered.world import SimulatedCluster

LINK = ClusterLink(1000.0, 0.5)
CHAIN = ("x", "y")


def setting(**changed: object) -> ClusterSetting:
    """Two workers on two hosts with a block each: 0.1 s a pass and 0.01 s a row, 10 bytes a row."""
    workers = [ClusterWorker(name, name, 10_000, 0, 1e4, 1e4, 100.0) for name in "ab"]
    blocks = {name: ClusterBlock(name, 1000, 2, 10, linear_profile(0.1, 0.01)) for name in CHAIN}
    base = ClusterSetting(
        workers, blocks, {"app": CHAIN}, {"x": ["a"], "y": ["b"]}, ClusterLink(1e6), LINK,
        DispatchSettings(loads=False),
    )  # fmt: skip
    return replace(base, **changed)  # type: ignore[arg-type]


def test_an_answer_takes_what_its_passes_and_links_take() -> None:
    cluster = SimulatedCluster(setting())
    found = cluster.play([ClusterAsk(1.0, "app", 20, 3)])
    prompt = (0.5 + 0.2) + (0.1 + 0.2)  # to a block, and through it
    token = (0.5 + 0.01) + (0.1 + 0.01)
    assert found.latencies == (pytest.approx(2 * prompt + 4 * token),)
    assert found.rate == pytest.approx(3 / found.latencies[0])
    assert found.between_nbytes == 10 * (20 * 2 + 4), (
        "rows of the prompt and of two tokens, from three senders"
    )
    assert (found.loads, found.recomputed, found.copied, found.adapted) == (0, 0, 0, 0)
    assert found.busy == pytest.approx((2 * 0.3 + 4 * 0.11) / 2 / found.latencies[0])
    assert cluster.traffic.traffic(0.0) == {("x", "y"): pytest.approx(10 * 22, rel=0.1)}


def test_rows_that_wait_are_packed() -> None:
    """Nine come while the first one's pass is under way: they share the next."""
    alone = ClusterSetting(
        setting().workers[:1], setting().blocks, {"app": ("x",)}, {"x": ["a"]}, ClusterLink(1e6), LINK
    )
    found = SimulatedCluster(alone).play(
        [ClusterAsk(0.0 if n == 0 else 0.01, "app", 1, 1) for n in range(10)]
    )
    sent = 0.5 + 0.01
    assert max(found.latencies) == pytest.approx(sent + 9 * 0.01 + 0.19 - 0.01, abs=0.11)
    few = SimulatedCluster(replace(alone, batch_rows=1)).play(
        [ClusterAsk(0.0, "app", 1, 1) for _ in range(10)]
    )
    assert max(few.latencies) == pytest.approx(sent + 10 * 0.11)
    assert max(found.latencies) < max(few.latencies) / 1.5


def both(rule: DispatchRule, **changed: object) -> ClusterSetting:
    """Both blocks on both workers."""
    everywhere = {name: ["a", "b"] for name in CHAIN}
    return setting(placed=everywhere, dispatch=DispatchSettings(4, rule, loads=False), **changed)


@pytest.mark.parametrize("rule", DispatchRule)
def test_all_is_answered_and_all_memory_returned(rule: DispatchRule) -> None:
    asks = [ClusterAsk(0.05 * n, "app", 5 + 7 * n % 40, 6) for n in range(20)]
    cluster = SimulatedCluster(both(rule, sweep=2.0))
    found = cluster.play(asks)
    assert len(found.latencies) == 20 and 0.0 < found.busy <= 1.0
    assert all(one.used == 2000 for one in cluster.view().workers.values()), "the blocks alone are left"
    assert (found.recomputed == 0) or rule in (DispatchRule.RECOMPUTE_ONLY, DispatchRule.OWNER_FIRST)
    assert (found.copied == 0) or rule is not DispatchRule.RECOMPUTE_ONLY
    samples = list[ClusterSample]()
    again = SimulatedCluster(both(rule, sweep=2.0)).play(asks, samples.append)
    assert again == found, "a virtual clock repeats itself"
    assert [one.at for one in samples] == [float(n) for n in range(1, len(samples) + 1)]
    assert all(one.block_nbytes == 4000 and one.page_nbytes >= 0 for one in samples)
    assert any(one.page_nbytes > 0 for one in samples)
    assert sorted(samples, key=lambda one: (one.computed, one.own_rows)) == samples
    assert samples[-1].computed <= found.busy * 2 * (asks[-1].at + max(found.latencies))
    assert samples[-1].stand_in_rows == 0, "no block stands in for one here"


def test_owners_keep_their_requests_where_links_are_slow() -> None:
    asks = [ClusterAsk(0.3 * n, "app", 20, 8) for n in range(20)]
    ours, least = (
        SimulatedCluster(both(rule)).play(asks)
        for rule in (DispatchRule.OWNER_FIRST, DispatchRule.LEAST_BUSY)
    )
    assert ours.between_nbytes < 0.7 * least.between_nbytes
    assert ours.copied + ours.recomputed < least.copied


def test_a_slow_link_is_learned_and_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to the first worker, behind a slow link, until messages have shown it; seldom after that."""
    slow = {pair: ClusterLink(20.0, 0.5) for pair in ((SCHEDULER, "a"), ("b", "a"))}
    asks = [ClusterAsk(2.0 * n, "app", 20, 4) for n in range(40)]
    alike, ours = (SimulatedCluster(both(DispatchRule.OWNER_FIRST, others=one)) for one in ({}, slow))
    fair = alike.play(asks)
    learned = ours.play(asks)
    monkeypatch.setattr("coserve.cluster.links.LinkTimer.came", lambda *_: None)
    unaware = SimulatedCluster(both(DispatchRule.OWNER_FIRST, others=slow)).play(asks)
    assert max(learned.latencies[5:]) < 0.5 * max(unaware.latencies[5:])
    sent = {pair: wire.nbytes for pair, wire in ours._wires.items()}
    assert sent[SCHEDULER, "a"] < 0.2 * sent[SCHEDULER, "b"]
    assert max(fair.latencies) < max(learned.latencies), "the first request met it"


def test_answers_count_what_stood_in() -> None:
    """Answers begin with the block's equivalent, or go there, where its own line is long."""
    blocks = dict(setting().blocks)
    blocks["x"] = replace(blocks["x"], equivalents=(("y", 0.99),))
    alone = setting(blocks=blocks, chains={"app": ("x",)}, approximates=True, batch_rows=20)
    asks = [ClusterAsk(0.1 * n, "app", 20, 3) for n in range(8)]
    samples = list[ClusterSample]()
    found = SimulatedCluster(alone).play(asks, samples.append)
    assert {0.0, 1.0} < {*found.stood_in}
    assert all((share * 22).is_integer() for share in found.stood_in), "of 22 rows each"
    assert 22 * min(found.stood_in) <= samples[-1].stand_in_rows <= 22 * sum(found.stood_in)
    exact = SimulatedCluster(replace(alone, approximates=False)).play(asks)
    assert exact.adapted == 0 and max(exact.latencies) > max(found.latencies)


def test_rows_that_came_together_stay_together() -> None:
    """One device with both blocks: who comes while the first block computes joins at the next token, and does
    not part those who are on their way."""
    alone = ClusterSetting(
        setting().workers[:1], setting().blocks, {"app": CHAIN}, {one: ["a"] for one in CHAIN},
        ClusterLink(1e9), ClusterLink(1e9),
    )  # fmt: skip
    asks = [ClusterAsk(0.0, "app", 1, 9), ClusterAsk(0.05, "app", 1, 9)]
    cluster = SimulatedCluster(alone)
    found = cluster.play(asks)
    both, one = 0.1 + 2 * 0.01, 0.1 + 0.01
    assert found.latencies == pytest.approx([2 * one + 8 * 2 * both, 4 * one + 8 * 2 * both - 0.05], abs=1e-3)


def test_a_full_queue_brings_an_instance() -> None:
    asks = [ClusterAsk(0.0, "app", 20, 4) for _ in range(60)]
    alone = setting(chains={"app": ("x",)}, most_queued=100, batch_rows=40)
    assert SimulatedCluster(alone).play(asks).added == 0
    found = SimulatedCluster(replace(alone, scaling=ScalingSettings(0.5, reserve=0.1))).play(asks)
    assert found.added == 1


def test_what_nobody_has_room_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="no worker has room"):
        SimulatedCluster(setting()).play([ClusterAsk(0.0, "app", 6000, 1)])
    with pytest.raises(ConfigError, match="blocks that the cluster has not: z"):
        setting(chains={"app": ("z",)})
    with pytest.raises(ConfigError, match="workers that are not there: c"):
        setting(placed={"x": ["c"]})
