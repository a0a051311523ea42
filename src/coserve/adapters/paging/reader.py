"""Reads adapters beside the steps, on a thread that takes little from them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.stored import StoredVersion
from coserve.core.contained import contained
from coserve.errors import AdapterError, CoserveError, OutOfMemory
from coserve.memory.exhausted import is_out_of_memory

Outcome = int | CoserveError
Read = Callable[[StoredVersion], AdapterVersion]
BringIn = Callable[[StoredVersion], int]  # onto the device; returns the bytes there


class Reads(Protocol):
    """Brings weights in while its caller goes on."""

    def begin(self, stored: StoredVersion) -> None:
        """Reads this one as well; `take` has it when that is done."""
        ...

    def take(self) -> list[tuple[StoredVersion, Outcome]]:
        """Returns adapters that have been read since the last time, or could not be."""
        ...


class Reader:
    """Reads one version after the other: two at once would only take more from the steps. `done` is called on
    the reading thread as soon as `take` has something."""

    def __init__(self, bring_in: BringIn, done: Callable[[], object] = int) -> None:
        self._bring_in, self._done = bring_in, done
        self._under_way: list[tuple[StoredVersion, Future[Outcome]]] = []
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, stored: StoredVersion) -> None:
        if self._thread is None:
            self._thread = _own_thread()
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
        """What one adapter's files lead to is its own: whoever takes the result goes on."""
        try:
            return self._bring_in(stored)
        except CoserveError as error:
            return error
        except BaseException as error:
            if is_out_of_memory(error):
                return OutOfMemory(f"there was no memory to load the adapter {stored.name!r}")
            return contained(error, f"loading the adapter {stored.name!r}", AdapterError)


def _own_thread() -> ThreadPoolExecutor:
    """A thread that has one of torch's. Setting their number there sets MKL's for all: that is set back."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, "adapters")
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)
    return pool
