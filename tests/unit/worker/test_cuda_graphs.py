"""The graphs of answers' passes: which are captured, kept and dropped, and what they read. What they compute
is compared in `tests/equivalence/test_graphs.py`."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.core.row_buckets import GRAPHS
from coserve.kernels.row_tiles import LARGEST
from coserve.worker import cuda_graphs
from coserve.worker.cuda_graphs import ROWS, ListedRows, PassGraphs, Run
from coserve.worker.sequence_table import NEWEST, DeviceRows

PADDING, PAGE, MOST_PAGES = 300, 16, 100


class Pool:
    """A pool of slots whose tables change with its capacity."""

    def __init__(self, capacity: int = 16) -> None:
        self.capacity, self.weights = capacity, dict[str, Any]()


class Desk:
    """Graphs on a processor, the kinds that were captured, and what the latest replay read."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, int]] = []
        self.error: RuntimeError | None = None
        pages = PAGE, MOST_PAGES
        self.graphs = PassGraphs(self.forward, self.record, PADDING, pages, torch.device("cpu"))

    def forward(self, rows: DeviceRows, slots: Sequence[Any]) -> Tensor:
        self.rows, self.read = rows, (rows.lines.tolist(), rows.positions.tolist())
        self.slots = [own._backend._slots.tolist() for own in slots]
        return torch.zeros(1, len(rows.lines), 4)

    def record(self, work: Run) -> Run:
        if self.error is not None:
            raise self.error
        work()
        self.captured.append((len(self.rows.lines), self.rows.pages))
        return work

    def run(
        self,
        rows: int,
        position: int = 0,
        pools: Sequence[Any] = (),
        prompts: Sequence[int] = (),
        draws: bool | None = None,
    ) -> Tensor | None:
        """Decode rows at a position, and prompts of so many rows that begin at 1, 2 and so on."""
        counts = [1] * rows + [*prompts]
        positions, tokens = [position] * rows, [NEWEST] * rows
        for number, count in enumerate(prompts):
            positions += range(number + 1, number + 1 + count)
            tokens += range(100, 100 + count)
        asked = {pool: [0] * len(positions) for pool in pools}
        ends = range(70, 70 + rows)
        found = self.graphs.find(
            ListedRows(range(len(counts)), counts, positions, tokens, asked, ends, draws)
        )
        return None if found is None else found()


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
    assert desk.run(1) is None
    desk.error = None
    assert desk.run(1) is not None
    desk.error = RuntimeError("operation not permitted when stream is capturing")
    assert desk.run(2) is None
    desk.error = None
    assert desk.run(2) is None and desk.run(1) is None
    assert desk.run(1, prompts=[5]) is not None, "what holds for decode rows need not hold for prompts"


def test_graphs_are_captured_before_the_first_answer() -> None:
    desk = Desk()
    desk.graphs.prepare(20)
    decodes = [(rows, 32) for rows in (1, 2, 4, 8, 16, 24)]
    assert desk.captured == 3 * decodes + [(rows, 0) for rows in GRAPHS]
    before = len(desk.captured)
    assert all(desk.run(20, draws=draws) is not None for draws in (None, False, True))
    assert desk.run(3, prompts=[600]) is not None
    assert desk.run(0, prompts=[7, 500]) is not None and len(desk.captured) == before


def test_graphs_that_sample_read_where_in_their_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk = Desk()
    for draws in (False, True):
        assert desk.run(3, 7, [Pool()], draws=draws) is not None
        assert desk.rows.ends is not None and desk.rows.draws is draws
        assert desk.rows.ends.tolist() == [70, 71, 72, 0] and desk.slots == [[0, 0, 0, -1]]
    assert desk.run(3, 7) is not None and desk.rows.ends is None
    assert desk.run(257, 7, draws=False) is None, "so many are sampled outside"


def test_passes_with_prompts_are_divided_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prompts there are, one graph holds them: each row is in one tile, of a single sequence, and
    padding in none."""
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    desk, pool = Desk(), Pool()
    for _ in range(60):
        bucket = random.choice(GRAPHS)
        lengths, left = list[int](), random.choice([bucket, bucket - 1, bucket // 2 + 1])
        decodes = random.randint(0, min(left, PADDING) // 2)
        left -= decodes
        while left and len(lengths) + decodes < PADDING - 1:
            lengths.append(random.randint(1, min(left, random.choice([1, 15, 16, 17, 2048]))))
            left -= lengths[-1]
        if not any(length > 1 for length in lengths):
            continue
        assert desk.run(decodes, 7, [pool], lengths) is not None
        counts, rows = [1] * decodes + lengths, decodes + sum(lengths)
        bucket = min(size for size in GRAPHS if size >= rows)
        lines = [line for line, count in enumerate(counts) for _ in range(count)]
        missing = bucket - rows
        assert desk.read[0] == lines + [PADDING] * missing and desk.slots == [[0] * rows + [-1] * missing]
        assert desk.rows.tokens is not None and desk.rows.tiles is not None
        tokens = [NEWEST] * decodes + [token for n in lengths for token in range(100, 100 + n)]
        assert desk.rows.tokens.tolist() == tokens + [0] * missing
        covered = list[int]()
        for start, count in zip(
            desk.rows.tiles.starts.tolist(), desk.rows.tiles.counts.tolist(), strict=True
        ):
            own = range(start, start + count)
            covered += own
            assert count <= LARGEST and len({lines[row] for row in own}) <= 1
            positions = desk.read[1][start : start + count]
            assert positions == [*range(desk.read[1][start], desk.read[1][start] + count)]
        assert covered == [*range(rows)]
    assert {rows for rows, _ in desk.captured} <= {*GRAPHS}
    assert desk.run(1, prompts=[GRAPHS[-1]]) is None, "too many rows"
    assert desk.run(257, 7) is not None and desk.read[0][257:] == [PADDING] * (384 - 257), "many decode rows"
