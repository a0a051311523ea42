"""Ranks that are threads of one process, for tests of what a rank computes."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from coserve.parallel.ranks import Ranks

T = TypeVar("T")


class ThreadRanks(Ranks):
    """One of several ranks; `calls` counts its collectives."""

    def __init__(self, number: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        self.number, self.count = number, len(board)
        self.calls = Counter[str]()
        self._board, self._barrier = board, barrier

    def sum(self, x: Tensor) -> Tensor:
        self.calls["sum"] += 1
        return x.copy_(torch.stack(self._parts(x)).sum(0))

    def columns(self, x: Tensor) -> Tensor:
        self.calls["columns"] += 1
        return torch.cat(self._parts(x), -1)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts(x), dim)

    def _parts(self, x: Tensor) -> list[Tensor]:
        self._board[self.number] = x.detach().clone()
        self._barrier.wait(20)
        parts = [*self._board]
        self._barrier.wait(20)
        return parts


def on_ranks(count: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """Returns what the function gives on each of so many ranks, which run together."""
    board, barrier = [torch.empty(0)] * count, threading.Barrier(count)

    def run(number: int) -> T:
        try:
            return function(ThreadRanks(number, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, number) for number in range(count)]
        faults = [fault for one in futures if (fault := one.exception()) is not None]
        if faults:
            raise next(
                (one for one in faults if not isinstance(one, threading.BrokenBarrierError)), faults[0]
            )
        return [one.result() for one in futures]
