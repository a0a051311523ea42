"""The queue of a block instance: who passes next, and with whom."""

import random

from coserve.cluster.agent import AgentQueue, precedence


def queue_of(*rows: tuple[str, set[int], int, bool, float], most: int = 8) -> AgentQueue[str]:
    queue: AgentQueue[str] = AgentQueue(most, countdown=0.05, patience=1.0)
    for item, keys, count, has_pages, since in rows:
        queue.put(item, keys, count, has_pages, since)
    return queue


def test_who_has_pages_here_goes_first() -> None:
    """In the order of arrival, as do the others behind them; who has waited for too long waits no more."""
    rows = [("a", {1}, 2, False, 0.0), ("b", {2}, 2, True, 0.1), ("c", {3}, 2, True, 0.2)]
    assert queue_of(*rows).take(0.3) == ["b", "c", "a"]
    assert queue_of(*rows, most=4).take(0.3) == ["b", "c"]
    assert queue_of(*rows, most=4).take(1.05) == ["a", "b"]
    assert queue_of(("wide", {1}, 99, False, 0.0)).take(0.0) == ["wide"], "rows that came together stay so"


def test_places_are_kept_for_sequences_that_return() -> None:
    """Until their countdown is over, or they are back."""
    queue = queue_of(("prompt", {9}, 5, False, 0.0), ("other", {8}, 3, False, 0.0))
    queue.expect(1, 0.0)
    assert queue.take(0.01) == ["prompt"], "three rows more would take the place of the one that comes back"
    assert queue.take(0.06) == ["other"]
    queue = queue_of(("prompt", {9}, 5, False, 0.0), ("other", {8}, 2, False, 0.0))
    queue.expect(1, 0.0)
    queue.put("back", {1}, 1, True, 0.02)
    assert queue.take(0.03) == ["back", "prompt", "other"]
    queue = queue_of(("prompt", {9}, 5, False, 0.0), ("other", {8}, 3, False, 0.0))
    queue.expect(1, 0.0)
    queue.forget([1])
    assert queue.take(0.01) == ["prompt", "other"]


def test_rows_of_a_sequence_pass_one_after_the_other() -> None:
    """Drawn queues: each item passes once, those of a sequence in their order and never in one batch, and no
    batch is larger than it may be; nothing waits while there is something to pass."""
    draw = random.Random(3)
    for _ in range(300):
        most = draw.randint(1, 12)
        queue: AgentQueue[int] = AgentQueue(most, draw.choice([0.0, 0.05]), draw.choice([0.0, 0.2]))
        items = {n: (draw.randint(0, 4), draw.randint(1, 6)) for n in range(draw.randint(1, 20))}
        waiting, passed, now = list(items), list[int](), 0.0
        while waiting or len(queue):
            now += draw.random() / 10
            for _ in range(draw.randint(0, 3)):
                if waiting:
                    number = waiting.pop(0)
                    key, rows = items[number]
                    queue.put(number, {key}, rows, draw.random() < 0.5, now)
            if draw.random() < 0.2 and len(queue):
                queue.drop(lambda item: item == -1)
            there = len(queue)
            batch = queue.take(now)
            assert bool(batch) == bool(there)
            assert len({items[n][0] for n in batch}) == len(batch)
            assert len(batch) == 1 or sum(items[n][1] for n in batch) <= most
            for number in batch:
                if draw.random() < 0.5:
                    queue.expect(items[number][0], now)
            passed += batch
        assert sorted(passed) == sorted(items)
        for key in range(5):
            own = [number for number in passed if items[number][0] == key]
            assert own == sorted(own)
    kept = queue_of(("a", {1}, 1, False, 0.0), ("b", {2}, 1, False, 0.0))
    kept.drop(lambda item: item == "a")
    assert (kept.rows, kept.oldest, kept.take(0.0)) == (1, 0.0, ["b"])
    order = queue_of(("first", {1}, 4, False, 0.0), ("second", {1}, 1, True, 0.1))
    assert (order.take(0.2), order.take(0.2)) == (["first"], ["second"])


def test_rows_that_are_furthest_go_first_unless_others_starve() -> None:
    def first(*waiting: tuple[int, float]) -> int:
        keys = [precedence(behind, since, 10.0) for behind, since in waiting]
        return keys.index(min(keys))

    assert first((2, 9.0), (0, 9.5), (1, 8.5)) == 1, "the fewest blocks are behind it"
    assert first((1, 9.5), (1, 9.0)) == 1, "of two as far the one that waits longer"
    assert first((0, 9.0), (3, 8.0), (2, 7.0)) == 2, "two seconds are too long, and the oldest first"
