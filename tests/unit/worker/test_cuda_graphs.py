"""The graphs of decode steps: which are captured, kept and dropped. What they compute is compared in
`tests/equivalence/test_many_adapters.py`."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.worker import cuda_graphs
from coserve.worker.cuda_graphs import ROWS, DecodeGraphs, Run

PADDING, PAGE, MOST_PAGES = 300, 16, 100


class Pool:
    """A pool of slots whose tables change with its capacity."""

    def __init__(self, capacity: int = 16) -> None:
        self.capacity, self.weights = capacity, dict[str, Any]()


class Desk:
    """Graphs on a processor, the kinds that were captured, and what the latest replay read."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, int]] = []
        self.read: tuple[list[int], list[int]] = [], []
        self.error: RuntimeError | None = None
        self.graphs = DecodeGraphs(self.decode, self.record, PADDING, (PAGE, MOST_PAGES), torch.device("cpu"))

    def decode(self, rows: Tensor, positions: Tensor, pages: int, slots: Sequence[Any]) -> Tensor:
        self.read = rows.tolist(), positions.tolist()
        self.slots = [own._backend._slots.tolist() for own in slots]
        self.latest = len(rows), pages
        return torch.zeros(1, len(rows), 4)

    def record(self, work: Run) -> Run:
        if self.error is not None:
            raise self.error
        work()
        self.captured.append(self.latest)
        return work

    def run(self, rows: int, position: int = 0, pools: Sequence[Any] = ()) -> Tensor | None:
        asked = {pool: [0] * rows for pool in pools}
        return self.graphs.run(range(rows), [position] * rows, asked)


def test_a_kind_of_step_is_captured_once_several_have_asked_for_it() -> None:
    desk = Desk()
    found = [desk.run(3) is not None for _ in range(2 * cuda_graphs._WORTH)]
    assert found == [turn >= cuda_graphs._WORTH - 1 for turn in range(len(found))]
    assert desk.captured == [(4, 512 // PAGE)]


def test_rows_are_padded_with_a_sequence_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk = Desk()
    for rows in (random.randint(1, 256) for _ in range(30)):
        assert desk.run(rows, 7) is not None
        bucket = min(size for size in ROWS if size >= rows)
        missing = bucket - rows
        assert desk.run(rows, 7, [Pool()]) is not None
        assert desk.slots == [[0] * rows + [-1] * missing], "no adapter, which may be broken, writes there"
        assert desk.read == ([*range(rows), *[PADDING] * missing], [7] * rows + [0] * missing)
    assert desk.graphs.takes(256) and not desk.graphs.takes(257) and not desk.graphs.takes(0)


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 32), (512, 32), (513, 64), (1024, 64), (1025, 100), (1600, 100)]
)
def test_pages_have_buckets_up_to_the_most(tokens: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk = Desk()
    assert desk.run(1, tokens - 1) is not None and desk.captured == [(1, pages)]


def test_graphs_of_tables_that_are_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk, pool = Desk(), Pool()
    for capacity in (16, 16, 32, 0):
        pool.capacity = capacity
        assert desk.run(2, pools=[pool]) is not None
    assert len(desk.captured) == 3 and len(desk.graphs._graphs) == 1


def test_no_mix_of_adapters_fills_memory_or_stops_steps_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants' adapters come in ever new shapes: their steps go kernel by kernel, and graphs are few."""
    desk = Desk()
    for _ in range(4 * cuda_graphs._MOST):
        assert desk.run(2, pools=[Pool()]) is None
    assert not desk.captured and len(desk.graphs._asked) <= cuda_graphs._MOST + 1
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    kept = Pool()
    for _ in range(2 * cuda_graphs._MOST):
        assert desk.run(2, pools=[Pool()]) is not None and desk.run(2, pools=[kept]) is not None
    assert len(desk.graphs._graphs) <= cuda_graphs._MOST
    assert len(desk.captured) == 2 * cuda_graphs._MOST + 1, "what is replayed stays"


def test_what_cannot_be_captured_is_not_tried_again_and_what_lacks_memory_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk = Desk()
    desk.error = torch.OutOfMemoryError("out of memory")
    assert desk.run(1) is None and desk.graphs.takes(1)
    desk.error = None
    assert desk.run(1) is not None
    desk.error = RuntimeError("operation not permitted when stream is capturing")
    assert desk.run(2) is None and not desk.graphs.takes(1)


def test_graphs_are_captured_before_the_first_answer() -> None:
    desk = Desk()
    desk.graphs.prepare(20)
    assert desk.captured == [(rows, 32) for rows in (1, 2, 4, 8, 16, 24)]
    assert desk.run(20) is not None and len(desk.captured) == 6
