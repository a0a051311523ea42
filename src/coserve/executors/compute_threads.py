"""The number of threads that compute: of this process, and of a step of a streamed base."""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from coserve.core.control_group import usable_processors

_FIRST: Final = 3  # steps with each count before the faster one is chosen
_AGAIN: Final = 64  # every so many steps the other count has one
_NEWEST: Final = 0.3  # weight of the newest step


def set_threads(count: int = 0) -> None:
    """Has torch compute with `count` threads; 0: with its default (`OMP_NUM_THREADS`, or one for each core),
    or with as many as the process has processors where these are fewer. A container's quota is no affinity,
    which is all that OpenMP looks at."""
    torch.set_num_threads(count or min(torch.get_num_threads(), usable_processors()))


@dataclass(slots=True)
class _Measured:
    steps: int = 0
    seconds: float = 0.0  # smoothed

    def add(self, seconds: float) -> None:
        self.seconds = seconds if not self.steps else self.seconds + _NEWEST * (seconds - self.seconds)
        self.steps += 1


class ComputeThreads:
    """Chooses all threads, or one fewer, for steps of a streamed base, by the seconds that earlier ones took:
    the thread that reads competes for the cores.

    Which is faster depends on rows, disk and page cache, and is tried: a step that waits for weights loses
    nothing by computing more slowly, and what is read is there sooner (decoding alone on two cores: 1.75 GB/s
    beside one thread that computes, 1.57 beside two).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._measured: dict[Hashable, dict[int, _Measured]] = {}
        self._steps: dict[Hashable, int] = {}

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Context of a step of this kind, which computes with the chosen number of torch's threads."""
        threads, began = self.choose(kind), time.perf_counter()
        if threads != self._most:
            torch.set_num_threads(threads)
        try:
            yield
            self.observe(kind, threads, time.perf_counter() - began)
        finally:
            if threads != self._most:
                torch.set_num_threads(self._most)

    def choose(self, kind: Hashable) -> int:
        """The number of threads for the next step of this kind."""
        if self._most == 1:
            return 1
        found = self._measured.setdefault(kind, {self._most: _Measured(), self._most - 1: _Measured()})
        count = self._steps[kind] = self._steps.get(kind, 0) + 1
        least = min(found, key=lambda threads: found[threads].steps)
        if found[least].steps < _FIRST:
            return least
        faster, other = sorted(found, key=lambda threads: found[threads].seconds)
        return faster if count % _AGAIN else other

    def observe(self, kind: Hashable, threads: int, seconds: float) -> None:
        """Notes that a step of this kind took so many seconds with so many threads."""
        if (found := self._measured.get(kind)) is not None and threads in found:
            found[threads].add(seconds)
