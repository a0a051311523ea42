"""Dispatch: the estimate against the paper's sum written out, the choice against all candidates, and the
rules."""

import random
from dataclasses import replace

import pytest

from coserve.cluster.dispatch import SCHEDULER, Dispatch, DispatchRule, DispatchSettings
from coserve.cluster.records import (
    BlockInstance,
    ChainRequest,
    ClusterBlock,
    ClusterLink,
    ClusterView,
    ClusterWorker,
    ComputeProfile,
)
from coserve.errors import ConfigError

PROFILE = ComputeProfile(((1, 0.1), (10, 0.2), (100, 1.1)))
LINK = ClusterLink(1000.0, 0.01)
WORKERS = ("a", "b", "c")


def view(*instances: BlockInstance, **used: int) -> ClusterView:
    """Three workers on two hosts, of 1,000 bytes each, with blocks of 400 bytes."""
    blocks = {
        "x": ClusterBlock("x", 400, 2, 4, PROFILE, 0, (("y", 0.99), ("z", 0.9))),
        "y": ClusterBlock("y", 400, 2, 4, PROFILE),
        "z": ClusterBlock("z", 400, 2, 4, PROFILE),
    }
    workers = {
        name: ClusterWorker(
            name, "left" if name == "a" else "right", 1000, used.get(name, 400), 4000.0, 800.0, 100.0
        )
        for name in WORKERS
    }
    links = {(one, other): LINK for one in (SCHEDULER, *WORKERS) for other in WORKERS if one != other}
    return ClusterView(workers, blocks, instances, links)


def at(worker: str, content: str = "x", *queue: int, idle: float | None = None) -> BlockInstance:
    return BlockInstance(worker, content, queue, 16, 400, idle)


def test_a_profile_is_interpolated() -> None:
    assert [PROFILE.seconds(rows) for rows in (0, 1, 10, 55, 100)] == pytest.approx([0, 0.1, 0.2, 0.65, 1.1])
    assert PROFILE.seconds(200) == pytest.approx(2.1)
    assert ComputeProfile(((4, 2.0),)).seconds(2) == 2.0 and ComputeProfile(((4, 2.0),)).seconds(8) == 4.0
    for wrong in ((), ((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((0, 1.0),)):
        with pytest.raises(ConfigError, match="compute profile"):
            ComputeProfile(wrong)


def test_the_parts_of_an_estimate() -> None:
    dispatch, request = Dispatch(), ChainRequest(1, 0, 10)
    seen = view(at("a", "x", 10, 1), at("a", "y", 100))
    found = dispatch.estimate(seen, request, "x", "a")
    assert found is not None
    assert found.queue == pytest.approx(0.2 + 0.1 + 1.1)  # all that waits for the device
    assert (found.compute, found.load) == (pytest.approx(0.2), 0.0)
    assert found.transfer == pytest.approx(0.01 + 10 * 4 / 1000)


def test_loading_hides_behind_the_transfer_on_an_idle_worker_alone() -> None:
    dispatch, request = Dispatch(), ChainRequest(1, 0, 100)
    transfer, swap = 0.01 + 0.4, 400 / 800
    idle = dispatch.estimate(view(), request, "x", "b")
    busy = dispatch.estimate(view(at("b", "y", 1)), request, "x", "b")
    assert idle is not None and idle.load == pytest.approx(swap - transfer)
    assert busy is not None and busy.load == pytest.approx(swap)
    hidden = dispatch.estimate(view(b=0), replace(request, rows=150), "x", "b")
    assert hidden is not None and hidden.load == 0.0
    leaving = dispatch.estimate(view(at("b", "y", idle=3.0), b=700), request, "x", "b")
    assert leaving is not None and leaving.evicted == ("y",)
    assert leaving.load == pytest.approx(400 / 4000 + swap - transfer)
    assert dispatch.estimate(view(at("b", "y", 1), b=700), request, "x", "b") is None, "y has work"


def test_pages_are_met_copied_or_recomputed() -> None:
    request = ChainRequest(1, 96, 1, {"x": {"a": 96, "b": 40}})
    seen = view(at("a"), at("b"), at("c"))
    row = 0.01 + 4 / 1000
    expected = {
        DispatchRule.RECOMPUTE_ONLY: {"b": 64 / 100, "c": 0.96},
        DispatchRule.COPY_ONLY: {"b": 0.01 + 64 * 2 / 1000, "c": 0.01 + 96 * 2 / 1000},
        DispatchRule.OWNER_FIRST: {"b": 0.01 + 64 * 2 / 1000, "c": 0.01 + 80 * 2 / 1000},
    }
    for rule, by_worker in expected.items():
        dispatch = Dispatch(DispatchSettings(rule=rule))
        owner = dispatch.estimate(seen, request, "x", "a", "a")
        assert owner is not None and owner.holds_pages and owner.transfer == 0.0 and owner.plan is None
        for worker, seconds in by_worker.items():
            found = dispatch.estimate(seen, request, "x", worker, "a")
            assert found is not None and not found.holds_pages and found.plan is not None
            assert found.transfer == pytest.approx(row + seconds), (rule, worker)
            assert found.source == (None if rule is DispatchRule.RECOMPUTE_ONLY else "a")


def test_the_owner_comes_first_where_queues_are_alike() -> None:
    dispatch, request = Dispatch(), ChainRequest(1, 16, 10, {"x": {"b": 16}})

    def chosen(*queue: int) -> str:
        found = dispatch.choose(view(at("a"), at("b", "x", *queue), at("c")), request, "x", "a")
        assert found is not None
        return found.worker

    assert chosen() == "b" and chosen(1) == "b"  # 0.1 seconds: less than its own pass
    assert chosen(100) == "a"  # a second's wait is more than a move
    slow = {**view().links, ("a", "b"): ClusterLink(10.0)}  # four seconds for its rows
    seen = replace(view(at("a"), at("b"), at("c")), links=slow)
    found = dispatch.choose(seen, request, "x", "a")
    assert found is not None and found.worker == "a", "an owner behind a slow link loses its rows"
    found = dispatch.choose(seen, request, "x", "c")
    assert found is not None and found.worker == "b", "it is slow for one sender alone"
    least_busy = Dispatch(DispatchSettings(rule=DispatchRule.LEAST_BUSY))
    found = least_busy.choose(view(at("a"), at("b", "x", 1), at("c")), request, "x", "b")
    assert found is not None and found.worker in "ac" and found.plan is not None and not found.plan.recomputed


def test_equivalents_stand_in_where_the_request_allows_it() -> None:
    dispatch, seen = Dispatch(), view(at("a", "x", 100, 100), at("b", "y"), at("c", "z"), c=700)
    exact, free = ChainRequest(1, 0, 1), ChainRequest(1, 0, 1, approximates=True)
    assert {one.content for one in dispatch.candidates(seen, exact, "x")} == {"x"}
    assert {one.content for one in dispatch.candidates(seen, free, "x")} == {"x", "y"}, "z is too far"
    found = dispatch.choose(seen, free, "x")
    assert found is not None and (found.worker, found.content) == ("b", "y")
    later = ChainRequest(1, 32, 1, {"x": {"a": 32}}, approximates=True)
    other = dispatch.estimate(seen, later, "y", "b", "a")
    assert other is not None and other.source is None and other.plan is not None
    assert other.plan.recomputed == 32, "another block's pages are of no use"


def test_who_is_dead_full_or_out_of_reach_is_no_candidate() -> None:
    dispatch, request = Dispatch(), ChainRequest(1, 0, 1)
    seen = view(at("a"), at("b"), replace(at("c"), queue=(200, 200)))
    workers = dict(seen.workers) | {"a": replace(seen.workers["a"], is_alive=False)}
    links = {pair: link for pair, link in seen.links.items() if pair != (SCHEDULER, "b")}
    assert dispatch.choose(replace(seen, workers=workers, links=links), request, "x") is None
    held = ChainRequest(1, 8, 1, {"x": {"c": 8}})
    found = dispatch.choose(replace(seen, workers=workers, links=links), held, "x")
    assert found is not None and found.worker == "c", "who left pages is let into a full queue"
    lost = ChainRequest(1, 8, 1, {"x": {"a": 8}})
    other = dispatch.choose(replace(seen, workers=workers), lost, "x")
    assert other is not None and (other.worker, other.source) == ("b", None)
    assert other.plan is not None and other.plan.recomputed == 8


def test_blocks_are_loaded_where_settings_allow_it() -> None:
    seen, request = view(at("b")), ChainRequest(1, 0, 1)
    assert {one.worker for one in Dispatch().candidates(seen, request, "x")} == {"a", "b", "c"}
    there = Dispatch(DispatchSettings(loads=False)).candidates(seen, request, "x")
    assert {one.worker for one in there} == {"b"}


def test_choices_are_those_of_all_candidates_tried() -> None:
    """The estimate written out once more, from the formulas."""
    draw = random.Random(3)
    for _ in range(150):
        there = [(w, c) for w in WORKERS for c in "xy" if draw.random() < 0.6]
        queues = {place: [draw.choice((1, 10, 40)) for _ in range(draw.randint(0, 2))] for place in there}
        seen = view(*(at(*place, *queue) for place, queue in queues.items()), **{w: 0 for w in WORKERS})
        tokens, rows, sender = (
            draw.choice((0, 20, 160)),
            draw.choice((1, 10)),
            draw.choice((SCHEDULER, *WORKERS)),
        )
        held = {w: draw.choice((0, tokens // 2, tokens)) for w in WORKERS} if tokens else {}
        rule = draw.choice([*DispatchRule])
        request = ChainRequest(1, tokens, rows, {"x": held})
        best: dict[str, tuple[float, float]] = {}  # seconds of all, and until the rows are computed
        for w in WORKERS:
            queue = sum(PROFILE.seconds(n) for place, own in queues.items() if place[0] == w for n in own)
            way = transfer = 0.0 if sender == w else 0.01 + rows * 4 / 1000
            lacks = 0 if held.get(w, 0) == tokens else tokens - held[w] // 16 * 16
            if lacks:
                whole = any(n == tokens for o, n in held.items() if o != w)
                ways = [(n, lacks - n) for n in [*range(0, lacks, 16), lacks]]
                if rule is DispatchRule.RECOMPUTE_ONLY or not whole:
                    ways = [(lacks, 0)]
                elif rule is not DispatchRule.OWNER_FIRST:
                    ways = [(0, lacks)]
                transfer += min(max(n / 100, 0.01 + m * 2 / 1000 if m else 0.0) for n, m in ways)
            swap = 0.0 if (w, "x") in there else 0.5
            load = max(swap - transfer, 0.0) if queue == 0 else swap
            best[w] = (queue + PROFILE.seconds(rows) + transfer + load, queue + way)
        found = Dispatch(DispatchSettings(rule=rule, alike=0.0)).choose(seen, request, "x", sender)
        assert found is not None and found.seconds == pytest.approx(best[found.worker][0])
        least = min(seconds for seconds, _ in best.values())
        if rule in (DispatchRule.RECOMPUTE_ONLY, DispatchRule.COPY_ONLY):
            assert found.seconds == pytest.approx(least)
        if rule is DispatchRule.OWNER_FIRST and found.seconds != pytest.approx(least):
            waits = [wait for _, wait in best.values()]
            assert found.holds_pages and best[found.worker][1] == pytest.approx(min(waits))


def test_settings_have_ranges() -> None:
    for wrong in ({"page": 0}, {"alike": -1.0}, {"least_similarity": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DispatchSettings(**wrong)  # type: ignore[arg-type]
