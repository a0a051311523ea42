"""Decode steps as CUDA graphs: the kernels of prologue and layers, launched as one.

From Python a decode step of an 8B model launches its kernels one by one in 33 ms on an H200, which computes
them in less than nine. There is a graph for each bucket of rows and of pages and for the pools of the rows'
adapters, captured once several steps have asked for it: it reads the rows' places in the sequence table,
their positions and their adapters' slots from tensors of its own, which each replay fills. Padding rows are
those of a sequence without tokens.

`Record` is the seam: `CudaGraphs` captures, `rerun`, its plain twin, computes anew in each replay.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.adapters.lora_batch import SlotRows
from coserve.adapters.slot_pools import LoraSlotPool
from coserve.kernels.lora.dispatch import make_row_slots
from coserve.memory.exhausted import is_out_of_memory

_log = logging.getLogger(__name__)

# Rows of graphs. Between two buckets a step computes padding, of which eight rows take no time that shows
# (bytes of weights dominate); each graph takes 0.1 s once and some MB of its own.
ROWS: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
_WORTH: Final = 8  # steps of one kind before one is captured: rare mixes of adapters are not worth the time
_MOST: Final = 256  # graphs; beyond them the one that was replayed longest ago goes
_FEWEST_TOKENS: Final = 512  # of the smallest bucket of pages; each further one has twice as many

Run = Callable[[], Tensor]
Record = Callable[[Run], Run]  # work, as something that does the same again with the same tensors
# Hidden rows [1, rows, width] of the sequences at `rows` [n] of the table and at `positions` [n], which have
# so many pages at most, with these adapters.
Decode = Callable[[Tensor, Tensor, int, Sequence[SlotRows]], Tensor]
_Kind = tuple[int, int, tuple[tuple[LoraSlotPool, int], ...]]  # rows, pages, pools with their capacities
PoolRows = Mapping[LoraSlotPool, Sequence[int]]  # the slot of each row, -1 for none


def rerun(work: Run) -> Run:
    """The plain twin of a graph: computes anew."""
    return work


class CudaGraphs:
    """Captures graphs, which share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Run) -> Run:
        """The work as a graph. Raises RuntimeError where it waits for the device, or does something else that
        no graph can hold."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()  # kernels are compiled, and libraries make what they need
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a stream's, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph, and the tensors that it reads: `given` [2, rows], places in the table and positions; slots
    [rows] of each pool."""

    given: Tensor
    slots: tuple[Tensor, ...]
    replay: Run


class DecodeGraphs:
    """The graphs of a device, by what they depend on. `padding` is the table's row without a sequence."""

    def __init__(
        self, decode: Decode, record: Record, padding: int, pages: tuple[int, int], device: torch.device
    ) -> None:
        """`pages` are the tokens of a page, and the most pages of a sequence."""
        self._decode, self._record, self._device = decode, record, device
        self._padding, (self._page_size, self._most_pages) = padding, pages
        self._graphs: dict[_Kind, _Graph] = {}  # in the order of their last replays
        self._asked: Counter[_Kind] = Counter()  # steps without one
        self._refused = False

    def takes(self, rows: int) -> bool:
        """Tells whether there are graphs of so many rows."""
        return not self._refused and 0 < rows <= ROWS[-1]

    def run(self, rows: Sequence[int], positions: Sequence[int], pools: PoolRows) -> Tensor | None:
        """Hidden rows [1, bucket, width] of decode rows, `rows` of the table at `positions`; valid until the
        next run. None where the model's work cannot be captured, or has not been yet."""
        bucket = ROWS[bisect_left(ROWS, len(rows))]
        kind = bucket, self._pages(max(positions) + 1), tuple((pool, pool.capacity) for pool in pools)
        if kind not in self._graphs and not self._is_worth(kind):
            return None
        graph = self._graph(kind)
        if graph is None:
            return None
        missing = bucket - len(rows)
        given = [[*rows, *[self._padding] * missing], [*positions, *[0] * missing]]
        graph.given.copy_(torch.tensor(given))
        for own, slots in zip(graph.slots, pools.values(), strict=True):
            own.copy_(torch.tensor([*slots, *[-1] * missing], dtype=torch.int32))
        return graph.replay()

    @torch.no_grad()
    def prepare(self, rows: int) -> None:
        """Captures the graphs of up to so many short sequences without adapters, for 0.1 s each: in the first
        steps that need them, answers would wait."""
        for bucket in ROWS[: bisect_left(ROWS, rows) + 1]:
            if not self._refused:
                self._graph((bucket, self._pages(1), ()))

    def _is_worth(self, kind: _Kind) -> bool:
        """Notes that a step has asked for a graph, and tells whether enough have."""
        if len(self._asked) > _MOST:
            self._asked.clear()
        self._asked[kind] += 1
        return self._asked[kind] >= _WORTH

    def _graph(self, kind: _Kind) -> _Graph | None:
        """The graph of a kind of step; None where there can be none."""
        graph = self._graphs.pop(kind, None)
        if graph is None:
            self._drop_old()
            rows, pages, pools = kind
            try:
                graph = self._captured(rows, pages, [pool for pool, _ in pools])
            except RuntimeError as error:
                if not is_out_of_memory(error):  # which may pass
                    self._refused = True
                why = str(error).partition("\n")[0]
                _log.warning("decode steps are launched kernel by kernel: %s", why)
                self._asked[kind] = 0
                return None
        self._graphs[kind] = graph
        return graph

    def _captured(self, rows: int, pages: int, pools: Sequence[LoraSlotPool]) -> _Graph:
        given = torch.zeros(2, rows, dtype=torch.long, device=self._device)
        given[0] = self._padding
        slots = tuple(torch.full((rows,), -1, dtype=torch.int32, device=self._device) for _ in pools)
        weights = [pool.weights for pool in pools]

        def work() -> Tensor:
            backends = map(make_row_slots, slots)
            added = [SlotRows(own, backend) for own, backend in zip(weights, backends, strict=True)]
            return self._decode(given[0], given[1], pages, added)

        return _Graph(given, slots, self._record(work))

    def _pages(self, tokens: int) -> int:
        """The bucket of pages of sequences with at most so many tokens."""
        room = _FEWEST_TOKENS
        while room < tokens:
            room *= 2
        return min(-(-room // self._page_size), self._most_pages)

    def _drop_old(self) -> None:
        """Drops graphs that read tables which their pools no longer have, and the oldest beyond `_MOST`."""
        for kind in [*self._graphs]:
            if len(self._graphs) >= _MOST or any(pool.capacity != slots for pool, slots in kind[2]):
                del self._graphs[kind]
