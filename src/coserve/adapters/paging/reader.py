"""Reads adapters on a low-priority thread while steps run."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.stored import StoredVersion
from coserve.core.contained import contained
from coserve.errors import AdapterError, CoserveError, OutOfMemory
from coserve.memory.exhausted import is_out_of_memory

Outcome = int | CoserveError
Read = Callable[[StoredVersion], AdapterVersion]
BringIn = Callable[[StoredVersion], int]  # onto the device; returns the bytes there
# What the first reads are taken for, and how fast: half a gigabyte a second.
_GUESSED_BYTES: Final = 16 << 20
_GUESSED_SECONDS: Final = _GUESSED_BYTES / (512 << 20)
_MEMORY: Final = 0.9  # of what earlier reads took, when another one is done


class Reads(Protocol):
    """Asynchronous loading of weights."""

    def begin(self, stored: StoredVersion) -> None:
        """Queues a version to be read; `take` returns it afterwards."""

    def take(self) -> list[tuple[StoredVersion, Outcome]]:
        """Returns versions read since the last call, each with its outcome or error."""


class Reader:
    """Reads one version at a time, to disturb steps less. `done` is called on the reading thread when `take`
    has a new result."""

    def __init__(self, bring_in: BringIn, done: Callable[[], object] = int) -> None:
        self._bring_in, self._done = bring_in, done
        self._under_way: list[tuple[StoredVersion, Future[Outcome]]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._read = _GUESSED_BYTES, _GUESSED_SECONDS  # bytes and seconds, of recent reads

    def seconds(self, nbytes: int) -> float:
        """Seconds that reading so many bytes takes, by recent reads."""
        read, taken = self._read
        return nbytes * taken / read

    def begin(self, stored: StoredVersion) -> None:
        if self._thread is None:
            self._thread = own_thread("adapters")
        future = self._thread.submit(self._outcome, stored)
        self._under_way.append((stored, future))
        future.add_done_callback(lambda _: self._done())

    def take(self) -> list[tuple[StoredVersion, Outcome]]:
        if not any(future.done() for _, future in self._under_way):
            return []
        done = [pair for pair in self._under_way if pair[1].done()]
        self._under_way = [pair for pair in self._under_way if pair not in done]
        return [(stored, future.result()) for stored, future in done]

    def _outcome(self, stored: StoredVersion) -> Outcome:
        """Reads one version; any error is returned as its outcome."""
        started = time.perf_counter()
        try:
            nbytes = self._bring_in(stored)
            read, taken = self._read
            seconds = time.perf_counter() - started
            self._read = int(_MEMORY * read) + nbytes, _MEMORY * taken + seconds
            return nbytes
        except CoserveError as error:
            return error
        except BaseException as error:
            if is_out_of_memory(error):
                return OutOfMemory(f"there was no memory to load the adapter {stored.name!r}")
            return contained(error, f"loading the adapter {stored.name!r}", AdapterError)


def own_thread(name: str) -> ThreadPoolExecutor:
    """A thread for which torch uses one thread. Setting that changes MKL's number for all threads, which is
    restored."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, name)
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)
    return pool
