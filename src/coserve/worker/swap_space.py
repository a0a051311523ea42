"""Copies of pages in the page store: a plan has pages of preempted sequences and of prefixes written there,
and read instead of computed again."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend
from coserve.core.plan import BasePlan
from coserve.errors import CoserveError
from coserve.memory.exhausted import is_out_of_memory
from coserve.streamed.files import PAGE
from coserve.worker.page_store import WORD, PageStore

_log = logging.getLogger(__name__)


class SwapSpace:
    """Copies by their numbers in a `store`, moved as plans say. `pages` is how many it has room for.

    A copy that cannot be written or read is dropped and reported, and the first of these failures is logged:
    what it held can be computed again.
    """

    def __init__(self, backend: AttentionBackend[Any], store: PageStore[Any], device: torch.device) -> None:
        self.store = store
        self.pages = store.nbytes // (-(-backend.page_nbytes // PAGE) * PAGE)  # a copy has whole blocks
        self._backend, self._device = backend, device
        self._width = -(-backend.page_nbytes // WORD) * WORD
        self._most = max(store.piece // self._width, 1)  # pages moved at once
        self._passing: Tensor | None = None  # memory on the device for as many
        self._warned = False

    def run(self, plan: BasePlan) -> tuple[tuple[int, ...], tuple[float, float]]:
        """Moves the pages of a plan; returns the copies that failed, and the seconds of writing and of
        reading."""
        if not (plan.swap_out or plan.swap_in or plan.swap_dropped):
            return (), (0.0, 0.0)
        for number in plan.swap_dropped:
            self.store.drop(number)
        started = self._now()
        failed = [out.copy for out in plan.swap_out if not self._write(out.copy, out.pages)]
        written = self._now()
        failed += [back.copy for back in plan.swap_in if not self._read(back.copy, back.first, back.pages)]
        return tuple(failed), (written - started, self._now() - written)

    def _write(self, number: int, pages: Sequence[int]) -> bool:
        """Copies pages; tells whether that was possible."""
        try:
            self.store.make(number, len(pages), self._width)
            if self._passing is None:
                size = (self._most, self._width)
                self._passing = torch.empty(size, dtype=torch.uint8, device=self._device)
            for start, part in self._pieces(pages):
                rows = self._passing[: len(part)]
                self._backend.read_pages(part, rows[:, : self._backend.page_nbytes])
                self.store.put(number, start, rows)
        except (CoserveError, OSError, RuntimeError) as error:
            self.store.drop(number)
            self._fail(error)
            return False
        return True

    def _read(self, number: int, first: int, pages: Sequence[int]) -> bool:
        """Fills pages with those of a copy from its `first` on, and drops it; tells whether that was
        possible."""
        if number not in self.store:  # it could not be written
            return False
        try:
            for start, part in self._pieces(pages):
                rows = self.store.get(number, first + start, len(part))
                self._backend.write_pages(part, rows[:, : self._backend.page_nbytes])
        except (CoserveError, OSError, RuntimeError) as error:
            self._fail(error)
            return False
        finally:
            self.store.drop(number)
        return True

    def _pieces(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        for start in range(0, len(pages), self._most):
            yield start, pages[start : start + self._most]

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise error
        if not self._warned:
            _log.warning("preempted sequences are computed again, as pages cannot be swapped: %s", error)
        self._warned = True

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
