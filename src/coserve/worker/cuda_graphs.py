"""Forward passes of answers as CUDA graphs: the kernels of prologue and layers, launched as one.

From Python the kernels of an 8B model's pass take 33 to 44 ms to launch one by one on an H200, which computes
32 decode rows in less than seven and a prompt of 128 in eight. There are graphs of decode rows, for each
bucket of rows and of pages, and of passes with prompts, whose rows may be divided among sequences in any way
(`kernels/row_tiles.py`), for each bucket of rows alone; all for the pools of the rows' adapters. They are
captured whole, attention too, since its kernel reads lengths and block tables on the device. Each reads its
rows' lines in the sequence table, positions, tokens and adapters' slots from one tensor of its own, which a
replay fills. Padding rows are those of a sequence without tokens, and write into no sequence's page.

`Record` is the seam: `CudaGraphs` captures, `rerun`, its plain twin, computes anew in each replay.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from coserve.adapters.lora_batch import SlotRows
from coserve.adapters.slot_pools import LoraSlotPool
from coserve.core.row_buckets import GRAPHS, graph_rows
from coserve.kernels.lora.dispatch import make_row_slots
from coserve.kernels.row_tiles import RowTiles, list_tiles, most_tiles
from coserve.memory.exhausted import is_out_of_memory
from coserve.worker.sequence_table import NEWEST, DeviceRows

_log = logging.getLogger(__name__)

# Rows of graphs of decode rows. Between two buckets a step computes padding, of which eight rows take no time
# that shows (bytes of weights dominate); each graph takes 0.1 s once and some MB of its own.
ROWS: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
_WORTH: Final = 8  # steps of one kind before one is captured: rare mixes of adapters are not worth the time
_MOST: Final = 256  # graphs; beyond them the one that was replayed longest ago goes
_FEWEST_TOKENS: Final = 512  # of the smallest bucket of pages; each further one has twice as many

Run = Callable[[], Tensor]
Record = Callable[[Run], Run]  # work, as something that does the same again with the same tensors
# Hidden rows [1, rows, width] of a pass, with these adapters; or the tokens [rows] that it samples.
Forward = Callable[[DeviceRows, Sequence[SlotRows]], Tensor]
PoolRows = Mapping[LoraSlotPool, Sequence[int]]  # the slot of each row, -1 for none


def rerun(work: Run) -> Run:
    """The plain twin of a graph: computes anew."""
    return work


class CudaGraphs:
    """Captures graphs, which share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.nbytes = device, 0  # of the memory that they share
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Run) -> Run:
        """The work as a graph. Raises RuntimeError where it waits for the device, or does something else that
        no graph can hold."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()  # kernels are compiled, and libraries make what they need
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        # Other threads, such as a stream's, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        self.nbytes += max(torch.cuda.memory_reserved(self._device) - before, 0)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def graph_nbytes(record: Record | None) -> int:
    """Bytes of device memory that the graphs of a recorder share; a plain twin has none."""
    return record.nbytes if isinstance(record, CudaGraphs) else 0


@dataclass(frozen=True, slots=True)
class ListedRows:
    """The rows of a pass on the host, sequence after sequence: the sequences' `lines` of the table and
    `counts` of rows, the rows' `positions` and `tokens`, and the slots of `pools`. Decode rows may be sampled
    in the graph, for positions `ends`, where it is known whether it `draws`."""

    lines: Sequence[int]
    counts: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int]
    pools: PoolRows
    ends: Sequence[int] = ()
    draws: bool | None = None


@dataclass(frozen=True, slots=True)
class _GraphKind:
    """A graph depends on its rows, the pages of decode rows, 0 of a pass with prompts, pools with their
    capacities, and whether it draws the tokens that it samples."""

    rows: int
    pages: int
    pools: tuple[tuple[LoraSlotPool, int], ...] = ()
    draws: bool | None = None

    @property
    def has_prompts(self) -> bool:
        return self.pages == 0


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph, and the tensor that it reads: columns one after the other, each filled up to its size with its
    own `padding`."""

    given: Tensor
    columns: Sequence[tuple[int, int]]  # sizes and paddings
    replay: Run

    def run(self, columns: Sequence[Sequence[int]]) -> Tensor:
        filled = list[int]()
        for own, (size, padding) in zip(columns, self.columns, strict=True):
            filled += own
            filled += [padding] * (size - len(own))
        # The host does not wait: what it has written is copied aside at once.
        self.given.copy_(torch.tensor(filled, dtype=torch.int32), non_blocking=True)
        return self.replay()


class PassGraphs:
    """The graphs of a device, by what they depend on. `padding` is the table's row without a sequence, which
    comes after all others."""

    def __init__(
        self, forward: Forward, record: Record, padding: int, pages: tuple[int, int], device: torch.device
    ) -> None:
        """`pages` are the tokens of a page, and the most pages of a sequence."""
        self._forward, self._record, self._device = forward, record, device
        self._padding, (self._page_size, self._most_pages) = padding, pages
        self._graphs: dict[_GraphKind, _Graph] = {}  # in the order of their last replays
        self._asked: Counter[_GraphKind] = Counter()  # steps without one
        self._refused: set[bool] = set()  # whether kinds that cannot be captured have prompts

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs hold on the device."""
        return graph_nbytes(self._record) + sum(graph.given.nbytes for graph in self._graphs.values())

    def find(self, rows: ListedRows, captures: bool = True) -> Run | None:
        """Gives the hidden rows [1, bucket, width] of a pass when called, or the tokens [bucket] that it
        samples, valid until the next one is run. None where the model's work cannot be captured, or has not
        been yet and is not to be for this step (`captures`)."""
        # A chunk of a prompt may have one row, too, whose token is not the sequence's newest.
        decodes = all(token == NEWEST for token in rows.tokens)
        bucket = graph_rows(len(rows.positions))
        pages = 0
        if decodes and len(rows.positions) <= ROWS[-1]:
            bucket = ROWS[bisect_left(ROWS, len(rows.positions))]
            pages = self._pages(max(rows.positions) + 1)
        if bucket is None or (rows.draws is not None and not pages):
            return None
        kind = _GraphKind(bucket, pages, tuple((pool, pool.capacity) for pool in rows.pools), rows.draws)
        if kind not in self._graphs and not (captures and self._is_worth(kind)):
            return None
        graph = self._graph(kind)
        if graph is None:
            return None
        columns = [rows.lines, rows.positions]
        if kind.has_prompts:
            lines = [line for line, count in zip(rows.lines, rows.counts, strict=True) for _ in range(count)]
            columns = [lines, rows.positions, rows.tokens, *list_tiles(rows.counts)]
        elif kind.draws is not None:
            columns.append(rows.ends)
        return partial(graph.run, [*columns, *rows.pools.values()])

    @torch.no_grad()
    def prepare(self, rows: int) -> None:
        """Captures the graphs of up to so many short sequences, and of all passes with prompts, without
        adapters, for 0.1 s each: in the first steps that need them, answers would wait."""
        ways, buckets = (None, False, True), ROWS[: bisect_left(ROWS, rows) + 1]
        kinds = [_GraphKind(bucket, self._pages(1), (), draws) for draws in ways for bucket in buckets]
        for kind in (*kinds, *(_GraphKind(bucket, 0) for bucket in GRAPHS)):
            self._graph(kind)

    def _is_worth(self, kind: _GraphKind) -> bool:
        """Notes that a step has asked for a graph, and tells whether enough have."""
        if len(self._asked) > _MOST:
            self._asked.clear()
        self._asked[kind] += 1
        return self._asked[kind] >= _WORTH

    def _graph(self, kind: _GraphKind) -> _Graph | None:
        """The graph of a kind of pass; None where there can be none."""
        if kind.has_prompts in self._refused:
            return None
        graph = self._graphs.pop(kind, None)
        if graph is None:
            self._drop_old()
            try:
                graph = self._captured(kind)
            except RuntimeError as error:
                if not is_out_of_memory(error):  # which may pass
                    self._refused.add(kind.has_prompts)
                what, why = "prompts" if kind.has_prompts else "decode steps", str(error).partition("\n")[0]
                _log.warning("%s are launched kernel by kernel: %s", what, why)
                self._asked[kind] = 0
                return None
        self._graphs[kind] = graph
        return graph

    def _captured(self, kind: _GraphKind) -> _Graph:
        rows, weights = kind.rows, [pool.weights for pool, _ in kind.pools]
        columns = [(rows, self._padding), (rows, 0)]  # lines and positions
        if kind.has_prompts:  # and tokens, and first rows and counts of tiles
            columns += [(rows, 0), *[(most_tiles(rows, self._padding), 0)] * 2]
        elif kind.draws is not None:
            columns.append((rows, 0))  # positions of the tokens
        known = len(columns)
        columns += [(rows, -1)] * len(weights)  # slots
        filled = [padding for size, padding in columns for _ in range(size)]
        flat = torch.tensor(filled, dtype=torch.int32).to(self._device)
        lines, positions, *others = torch.split(flat, [size for size, _ in columns])
        slots = others[known - 2 :]

        def work() -> Tensor:
            tokens, tiles, ends = None, None, None
            if kind.has_prompts:
                tokens, tiles = others[0].long(), RowTiles(others[1], others[2], lines)
            elif kind.draws is not None:
                ends = others[0].long()
            backends = [make_row_slots(own, tiles) for own in slots]
            added = [SlotRows(own, backend) for own, backend in zip(weights, backends, strict=True)]
            given = lines.long(), positions.long(), kind.pages, tokens, tiles, ends, bool(kind.draws)
            return self._forward(DeviceRows(*given), added)

        return _Graph(flat, columns, self._record(work))

    def _pages(self, tokens: int) -> int:
        """The bucket of pages of sequences with at most so many tokens."""
        room = _FEWEST_TOKENS
        while room < tokens:
            room *= 2
        return min(-(-room // self._page_size), self._most_pages)

    def _drop_old(self) -> None:
        """Drops graphs that read tables which their pools no longer have, and the oldest beyond `_MOST`."""
        for kind in [*self._graphs]:
            if len(self._graphs) >= _MOST or any(pool.capacity != slots for pool, slots in kind.pools):
                del self._graphs[kind]
