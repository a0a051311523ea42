"""Pages that move to the page store and back beside steps: those of preempted sequences and of prefixes.
They are read instead of computed again."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.adapters.paging.reader import own_thread
from coserve.core.plan import STAGED, BasePlan, CopyKind, Moved, SwapIn, SwapOut
from coserve.core.step_trace import span
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
    """A copy on its way. `job` is what the thread does for it, None before the thread has it."""

    plan: SwapOut | SwapIn
    job: Future[Tensor | None] | None = None
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
    its own, with a stream of its own on a GPU, moves staged rows to the store and back, one copy after the
    other. So no step waits for the store. Plans write no more than `STAGED` bytes at a time; as many are read
    ahead, or one copy. A copy that cannot be written or read is dropped and reported, and the first of these
    failures is logged: what it held can be computed again.
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
        self._warned = False

    def begin(self, plan: BasePlan) -> None:
        """Begins the moves of a plan, behind those of the plans before it."""
        for name in plan.swap_dropped:
            moves = [move for move in self._moves if move.plan.copy == name]
            for move in moves:
                move.is_dropped = True
            if not moves:  # else its room is free when they have ended
                self.store.drop(name)
        for move in map(_Move, plan.moves):
            self._moves.append(move)
            if isinstance(move.plan, SwapOut):
                self._write(move)
        self._read_on()

    def take(self, seconds: float = 0.0) -> Moved:
        """Ends the moves that are done, and returns them; waits up to so many seconds for one."""
        jobs = [move.job for move in self._moves if move.job is not None]
        if seconds and jobs:
            wait(jobs, seconds, FIRST_COMPLETED)
        moves, self._moves = self._moves, []
        ended: list[_Move] = []
        for move in moves:
            (ended if self._advance(move) else self._moves).append(move)
        left = {move.plan.copy for move in self._moves}  # a read that is under way drops its copy later
        for move in ended:
            if (move.is_over or isinstance(move.plan, SwapIn)) and move.plan.copy not in left:
                self.store.drop(move.plan.copy)
        for move in ended:
            if move.error is not None:
                self._fail(move.error)
        self._read_on()
        out, back = ([move for move in ended if isinstance(move.plan, way)] for way in (SwapOut, SwapIn))
        return Moved(
            tuple(move.plan.copy for move in out),
            tuple(move.plan.copy for move in back),
            tuple(move.plan.copy for move in ended if move.error is not None),
            (_seconds(out), _seconds(back)),
        )

    def _write(self, move: _Move) -> None:
        """Stages pages for the thread."""
        places, pages, width = self._places[move.plan.kind], move.plan.pages, self._width(move.plan)
        try:
            rows = torch.empty(len(pages), width, dtype=torch.uint8, device=self._device)
            places.read_pages(pages, rows[:, : places.page_nbytes])
        except _FAILURES as error:
            move.error = error
            return
        staged = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        move.job = self._submit(move, partial(self._put, move.plan.copy, rows), staged)

    def _read_on(self) -> None:
        """Has the thread read the next copies as there is room for them in staging memory."""
        staged = 0  # bytes that are there, or on their way
        for move in self._moves:
            if isinstance(move.plan, SwapIn) and not (move.job is None and move.is_over):
                nbytes = len(move.plan.pages) * self._width(move.plan)
                if move.job is None:
                    if 0 < staged > STAGED - nbytes:
                        return
                    move.job = self._submit(move, partial(self._get, move.plan))
                staged += nbytes

    def _advance(self, move: _Move) -> bool:
        """Tells whether a move has ended; one that has read fills its pages then."""
        if move.job is None:
            return move.is_over
        if not move.job.done():
            return False
        if (rows := move.job.result()) is not None and not move.is_over:
            places = self._places[move.plan.kind]
            try:
                places.write_pages(move.plan.pages, rows[:, : places.page_nbytes])
            except _FAILURES as error:
                move.error = error
            if rows.is_cuda:
                rows.record_stream(torch.cuda.current_stream(self._device))
        return True

    def _width(self, plan: SwapOut | SwapIn) -> int:
        return -(-self._places[plan.kind].page_nbytes // WORD) * WORD

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise error
        if not (self._warned or isinstance(error, KeyError)):
            _log.warning("preempted sequences are computed again, as pages cannot be swapped: %s", error)
            self._warned = True

    def _submit(
        self, move: _Move, work: Callable[[], Tensor | None], staged: torch.cuda.Event | None = None
    ) -> Future[Tensor | None]:
        """Has the thread do its part of a move, for which rows were `staged`."""
        if self._thread is None:
            self._thread = own_thread("pages")
        return self._thread.submit(self._do, move, work, staged)

    # On the thread

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
                with span("copy of pages"):
                    rows = work()
                if self._stream is not None:
                    self._stream.synchronize()
            return rows
        except _FAILURES as error:
            move.error = error
            self.store.drop(move.plan.copy)  # a read of it may be next, and memory has no checksums
            return None
        finally:
            move.seconds += time.perf_counter() - started

    def _put(self, name: int | bytes, rows: Tensor) -> None:
        self.store.make(name, *rows.shape)
        self.store.put(name, 0, rows)

    def _get(self, plan: SwapIn) -> Tensor:
        rows = self.store.get(plan.copy, plan.first, len(plan.pages))
        return rows if rows.is_cuda else rows.clone()  # the store's own memory


def _seconds(moves: Iterable[_Move]) -> float:
    """Seconds of moves; nobody learns from those that were dropped."""
    return sum(move.seconds for move in moves if not move.is_dropped)
