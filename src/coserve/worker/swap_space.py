"""Pages that move to the page store and back beside steps: those of preempted sequences and of prefixes.
They are read instead of computed again."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.adapters.paging.reader import own_thread
from coserve.core.plan import STAGED, BasePlan, CopyKind, Moved, SwapIn, SwapOut
from coserve.errors import CoserveError
from coserve.memory.exhausted import is_out_of_memory
from coserve.streamed.files import PAGE
from coserve.worker.page_store import WORD, PageStore

_log = logging.getLogger(__name__)

_FAILURES: Final = (CoserveError, OSError, RuntimeError, KeyError)  # the last: a copy that was not written


class DevicePlaces(Protocol):
    """Places on the device for entries of one kind, by number: `AttentionBackend` has pages."""

    @property
    def page_nbytes(self) -> int: ...

    def read_pages(self, pages: Sequence[int], out: Tensor) -> None: ...

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None: ...


@dataclass(slots=True, eq=False)
class _Move:
    """A copy on its way, of which `asked` rows are with the thread or have passed it. `parts` are those that
    the thread has, with their places on the device."""

    plan: SwapOut | SwapIn
    asked: int = 0
    parts: deque[tuple[Sequence[int], Future[Tensor | None]]] = field(default_factory=deque)
    seconds: float = 0.0
    error: Exception | None = None
    is_dropped: bool = False

    @property
    def is_over(self) -> bool:
        """Tells whether nothing more of it is to move."""
        return self.is_dropped or self.error is not None


class SwapSpace:
    """Copies by name in a `store`, of some kinds of `places`, moved as plans say.

    Only the thread that runs plans touches places on the device. It copies pages into staging memory before
    anything overwrites them, and copies what has arrived there to its pages between two steps. A thread of
    its own, with a stream of its own on a GPU, moves staged rows to the store and back. So steps do not wait
    for the store, but for room in staging memory: of `STAGED` bytes each way, or of one part. A copy that
    cannot be written or read is dropped and reported, and the first of these failures is logged: what it held
    can be computed again.
    """

    def __init__(
        self, places: Mapping[CopyKind, DevicePlaces], store: PageStore[Any], device: torch.device
    ) -> None:
        self.store = store
        # A copy has whole blocks.
        self.pages = store.nbytes // (-(-places[CopyKind.PAGES].page_nbytes // PAGE) * PAGE)
        self._places, self._device = places, device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._thread: ThreadPoolExecutor | None = None
        self._moves: list[_Move] = []  # that have not been reported, in the order of the plans
        self._staged: dict[type[SwapOut | SwapIn], int] = {SwapOut: 0, SwapIn: 0}  # bytes
        self._warned = False

    def begin(self, plan: BasePlan) -> None:
        """Begins the moves of a plan, behind those of the plans before it."""
        for name in plan.swap_dropped:
            for move in self._moves:
                move.is_dropped |= move.plan.copy == name
            self._submit(self.store.drop, name)
        for move in map(_Move, plan.moves):
            self._moves.append(move)
            if isinstance(move.plan, SwapOut):
                self._write(move)
        self._read_on()

    def take(self, seconds: float = 0.0) -> Moved:
        """Ends the moves that are done, and returns them; waits up to so many seconds for a part of one."""
        if seconds:
            self._wait(SwapOut, SwapIn, seconds=seconds)
        ended = [move for move in self._moves if self._advance(move)]
        self._moves = [move for move in self._moves if move not in ended]
        for move in ended:
            if isinstance(move.plan, SwapIn):
                self._submit(self.store.drop, move.plan.copy)
        for move in ended:
            if move.error is not None:
                self._fail(move.error)
        self._read_on()
        out, back = ([move for move in ended if isinstance(move.plan, way)] for way in (SwapOut, SwapIn))
        return Moved(
            tuple(move.plan.copy for move in out),
            tuple(move.plan.copy for move in back),
            tuple(move.plan.copy for move in ended if move.error is not None),
            (sum(move.seconds for move in out), sum(move.seconds for move in back)),
        )

    def settle(self) -> None:
        """Waits until the store has the room of the copies that were read or dropped."""
        self._submit(int).result()

    def _write(self, move: _Move) -> None:
        """Stages pages for the thread, part by part as there is room for them."""
        places = self._places[move.plan.kind]
        for start, part, nbytes in self._parts(move.plan):
            while self._is_full(SwapOut, nbytes):
                self._wait(SwapOut)
                for other in self._moves:
                    self._advance(other)
            try:
                rows = torch.empty(len(part), nbytes // len(part), dtype=torch.uint8, device=self._device)
                places.read_pages(part, rows[:, : places.page_nbytes])
            except _FAILURES as error:
                move.error = error
                self._submit(self.store.drop, move.plan.copy)
                return
            staged = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
            self._stage(move, part, nbytes, partial(self._put, move, start, rows), staged)

    def _read_on(self) -> None:
        """Has the thread read the next parts of copies as there is room for them."""
        for move in self._moves:
            if isinstance(move.plan, SwapIn) and not move.is_over:
                for start, part, nbytes in self._parts(move.plan):
                    if start < move.asked:
                        continue
                    if self._is_full(SwapIn, nbytes):
                        return
                    work = partial(self._get, move.plan.copy, move.plan.first + start, len(part))
                    self._stage(move, part, nbytes, work)

    def _stage(
        self,
        move: _Move,
        part: Sequence[int],
        nbytes: int,
        work: Callable[[], Tensor | None],
        staged: torch.cuda.Event | None = None,
    ) -> None:
        """Has the thread do some work on a part of a move, for which rows were `staged`."""
        self._staged[type(move.plan)] += nbytes
        move.asked += len(part)
        move.parts.append((part, self._submit(self._do, move, work, staged)))

    def _advance(self, move: _Move) -> bool:
        """Takes what the thread has done of a move, and fills pages; tells whether that was all."""
        places = self._places[move.plan.kind]
        while move.parts and move.parts[0][1].done():
            part, job = move.parts.popleft()
            self._staged[type(move.plan)] -= len(part) * self._width(move.plan)
            if (rows := job.result()) is not None and not move.is_over:
                places.write_pages(part, rows[:, : places.page_nbytes])
                if rows.is_cuda:
                    rows.record_stream(torch.cuda.current_stream(self._device))
        return not move.parts and (move.is_over or move.asked == len(move.plan.pages))

    def _wait(self, *ways: type[SwapOut | SwapIn], seconds: float | None = None) -> None:
        """Waits until the thread has done a part of a move in some direction, if it has any."""
        parts = [part for move in self._moves if isinstance(move.plan, ways) for part in move.parts]
        if parts:
            wait([job for _, job in parts], seconds, FIRST_COMPLETED)

    def _is_full(self, way: type[SwapOut | SwapIn], nbytes: int) -> bool:
        """Tells whether staging memory in a direction has something in it and no room for so many bytes."""
        return 0 < self._staged[way] > STAGED - nbytes

    def _width(self, plan: SwapOut | SwapIn) -> int:
        return -(-self._places[plan.kind].page_nbytes // WORD) * WORD

    def _parts(self, plan: SwapOut | SwapIn) -> Iterator[tuple[int, Sequence[int], int]]:
        """Parts of a move: the first row, places, and bytes."""
        width = self._width(plan)
        most = max(self.store.piece // width, 1)
        for start in range(0, len(plan.pages), most):
            part = plan.pages[start : start + most]
            yield start, part, len(part) * width

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise error
        if not (self._warned or isinstance(error, KeyError)):
            _log.warning("preempted sequences are computed again, as pages cannot be swapped: %s", error)
            self._warned = True

    # On the thread

    def _submit(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        if self._thread is None:
            self._thread = own_thread("pages")
        return self._thread.submit(work, *arguments)

    def _do(
        self, move: _Move, work: Callable[[], Tensor | None], staged: torch.cuda.Event | None
    ) -> Tensor | None:
        started = time.perf_counter()
        try:
            if move.is_over:
                return None
            with torch.cuda.stream(self._stream):  # does nothing without one
                if self._stream is not None and staged is not None:
                    self._stream.wait_event(staged)
                rows = work()
                if self._stream is not None:
                    self._stream.synchronize()
            return rows
        except _FAILURES as error:
            move.error = error
            self.store.drop(move.plan.copy)
            return None
        finally:
            move.seconds += time.perf_counter() - started

    def _put(self, move: _Move, start: int, rows: Tensor) -> None:
        if not start:
            self.store.make(move.plan.copy, len(move.plan.pages), rows.shape[1])
        self.store.put(move.plan.copy, start, rows)

    def _get(self, name: int | bytes, first: int, count: int) -> Tensor:
        rows = self.store.get(name, first, count)
        return rows if rows.is_cuda else rows.clone()  # the store's own memory
