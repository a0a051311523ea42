"""Passes through a chain of blocks in lockstep: each block is visited by all of them before the next one is.

Proofs need several passes with different rows. Where blocks pass through memory, each of them would read the
base once; in lockstep they read it once together.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Generic, TypeVar

from coserve.core.sequence import Direction
from coserve.model.block import Block, Resident

T = TypeVar("T")


def in_lockstep(blocks: Sequence[Block], passes: Sequence[Callable[[], T]]) -> list[T]:
    """Runs functions that visit `blocks` in order; returns their results. At each block an earlier one of
    them precedes the later ones, so that it may leave behind what these need there.

    They run in turn on the caller's thread where all blocks are in memory; else each on a thread of its own,
    one at a time. Raises the error of the first that fails.
    """
    if all(isinstance(block.residence, Resident) for block in blocks):
        return [run() for run in passes]
    return _Lockstep(blocks, passes).run()


class _Lockstep(Generic[T]):
    """Hands one turn around among threads, always to the one that has come least far."""

    def __init__(self, blocks: Sequence[Block], passes: Sequence[Callable[[], T]]) -> None:
        self._blocks, self._passes = blocks, passes
        self._turns = threading.Condition()
        self._places = dict.fromkeys(range(len(passes)), -1)  # of those under way, by their numbers
        self._own = threading.local()
        self._held = ExitStack()  # a visit of the block at `_held_place`, until all have left it
        self._held_place = -1
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}

    def run(self) -> list[T]:
        threads = [threading.Thread(target=self._go, args=(number,)) for number in range(len(self._passes))]
        for place, block in enumerate(self._blocks):
            block.before_visit = partial(self._arrive, place)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for block in self._blocks:
                block.before_visit = int
            self._held.close()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._passes))]

    def _go(self, number: int) -> None:
        self._own.number = number
        try:
            self._wait()
            self._results[number] = self._passes[number]()
        except BaseException as error:
            self._errors[number] = error
        finally:
            with self._turns:
                del self._places[number]
                self._turns.notify_all()

    def _arrive(self, place: int) -> None:
        """Waits at a block until it is this thread's turn there."""
        with self._turns:
            self._places[self._own.number] = place
            self._turns.notify_all()
        self._wait()
        if place != self._held_place:
            self._held.close()
            self._held_place = place
            self._held.enter_context(self._blocks[place].visit(Direction.INFER))

    def _wait(self) -> None:
        with self._turns:
            self._turns.wait_for(lambda: min(self._places, key=self._key) == self._own.number)

    def _key(self, number: int) -> tuple[int, int]:
        return self._places[number], number
