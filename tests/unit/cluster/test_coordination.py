"""Pages that move before they are needed, and copies that are swept."""

from test_cluster_dispatch import at, view

from coserve.cluster.coordination import (
    PagesCopy,
    PausedPages,
    migration_order,
    proactive_moves,
    redundant_copies,
)
from coserve.cluster.dispatch import Dispatch
from coserve.cluster.records import ChainRequest


def paused(key: int, shared: int, at_: float, tokens: int = 32) -> PausedPages:
    return PausedPages(ChainRequest(key, tokens, 1, {"x": {"a": tokens}}), shared, at_)


def test_a_pause_lasts_as_long_again() -> None:
    assert paused(1, 0, 4.0).resumes_at(10.0) == 16.0


def test_pages_with_the_fewest_readers_move_first_then_those_that_resume_first() -> None:
    order = [paused(1, 2, 9.0), paused(2, 0, 1.0), paused(3, 0, 8.0), paused(4, 1, 0.0)]
    assert [one.request.key for one in migration_order(order, 10.0)] == [3, 2, 4, 1]


def test_pages_move_ahead_where_the_owner_is_busy_and_the_pause_is_long_enough() -> None:
    busy = view(at("a", "x", 100, 100, 100), at("b"), b=400)
    requests = [paused(1, 0, 9.99), paused(2, 1, 5.0), paused(3, 2, 5.0)]
    moves = [*proactive_moves(busy, requests, 10.0, Dispatch())]
    assert [(one.key, one.estimate.worker) for one in moves] == [(2, "b")], "1 would come too late"
    assert [one.key for one in proactive_moves(busy, requests[2:], 10.0, Dispatch())] == [3], (
        "at the next look"
    )
    quiet = view(at("a"), at("b"))
    assert not [*proactive_moves(quiet, requests, 10.0, Dispatch())]


def test_a_sweep_keeps_one_whole_copy_of_open_requests() -> None:
    copies = [
        PagesCopy(1, "x", "a", 32), PagesCopy(1, "x", "b", 32), PagesCopy(1, "x", "c", 16),
        PagesCopy(2, "x", "a", 8), PagesCopy(2, "x", "b", 8, readers=1),
        PagesCopy(3, "x", "a", 8), PagesCopy(3, "y", "a", 8),
    ]  # fmt: skip
    found = redundant_copies(copies, {(1, "x"): "b", (2, "x"): "a"}, [1, 2])
    assert {(one.key, one.content, one.worker) for one in found} == {
        (1, "x", "a"), (1, "x", "c"), (3, "x", "a"), (3, "y", "a"),
    }  # fmt: skip
    behind = redundant_copies(copies[:3], {(1, "x"): "c"}, [1])
    assert {one.worker for one in behind} == {"b", "c"}, "the last whole copy stays, wherever rows go"
