"""The order in which calls are computed, and those that are computed together."""

import time

import pytest

from coserve.split.messages import LinearCall
from coserve.split.queues import AGE_SECONDS, Batching, CallQueues, Work


def work(number: int, path: str = "a", kind: str = "inference", rows: int = 1, age: float = 0.0) -> Work:
    call = LinearCall(number, (path,), "forward", rows, "float32", kind, 0)  # type: ignore[arg-type]
    return Work(call, [], lambda outcome: None, time.monotonic() - age)


def taken(*works: Work, batching: Batching = "waiting", most_rows: int = 10) -> list[list[int]]:
    queues = CallQueues(batching, most_rows)
    for one in works:
        queues.put(one)
    found: list[list[int]] = []
    while sum(map(len, found)) < len(works):
        found.append([one.call.number for one in queues.take()])
    queues.close()
    assert queues.take() == []
    return found


def test_inference_goes_ahead_of_training_that_has_not_waited_long() -> None:
    old = AGE_SECONDS + 1
    assert taken(work(1, "a", "training", age=0.1), work(2, "b")) == [[2], [1]]
    assert taken(work(1, "a", "training", age=old), work(2, "b")) == [[1], [2]]
    assert taken(work(1, "a", age=0.1), work(2, "b", age=0.2)) == [[2], [1]]  # else the oldest


def test_calls_at_the_same_linears_are_computed_together() -> None:
    works = [work(1), work(2, "b"), work(3), work(4, kind="training"), work(5, "b"), work(6)]
    assert taken(*works) == [[1, 3, 6], [2, 5], [4]]
    assert taken(*works, batching="none") == [[1], [2], [3], [5], [6], [4]]


@pytest.mark.parametrize(("rows", "wanted"), [((4, 6, 1), [[1, 2], [3]]), ((11, 1), [[1], [2]])])
def test_rows_of_a_product_are_bounded(rows: tuple[int, ...], wanted: list[list[int]]) -> None:
    assert taken(*(work(number, rows=count) for number, count in enumerate(rows, 1))) == wanted
