"""Passes in lockstep: each block is brought in once for all of them, and errors come out."""

import threading

import pytest
from torch import nn

from coserve.core.sequence import Direction
from coserve.model.block import Block, Residence
from coserve.model.lockstep import in_lockstep


class Noting(Residence):
    """`Residence` that notes when its block comes and goes."""

    def __init__(self, place: int, notes: list[object]) -> None:
        self._place, self._notes = place, notes

    def enter(self, direction: Direction) -> None:
        self._notes.append(f"enter {self._place}")

    def leave(self) -> None:
        self._notes.append(f"leave {self._place}")


def chain(notes: list[object], count: int = 3, streamed: bool = True) -> list[Block]:
    blocks = [Block(f"layers.{place}", nn.Identity()) for place in range(count)]
    for place, block in enumerate(blocks):
        if streamed:
            block.residence = Noting(place, notes)
    return blocks


def test_each_block_comes_once_and_earlier_passes_precede_later_ones() -> None:
    notes: list[object] = []
    blocks = chain(notes)

    def go(name: str, places: range) -> str:
        for place in places:
            with blocks[place].visit(Direction.INFER):
                notes.append((name, place))
        return name

    passes = [lambda: go("a", range(3)), lambda: go("b", range(1, 3)), lambda: go("c", range(2))]
    assert in_lockstep(blocks, passes) == ["a", "b", "c"]
    assert notes == [
        "enter 0", ("a", 0), ("c", 0), "leave 0",
        "enter 1", ("a", 1), ("b", 1), ("c", 1), "leave 1",
        "enter 2", ("a", 2), ("b", 2), "leave 2",
    ]  # fmt: skip


def test_the_first_error_is_raised_and_visits_end() -> None:
    notes: list[object] = []
    blocks = chain(notes)

    def fail(place: int) -> None:
        with blocks[place].visit(Direction.INFER):
            raise ValueError(f"at {place}")

    def go() -> None:
        for block in blocks:
            with block.visit(Direction.INFER):
                pass

    with pytest.raises(ValueError, match="at 2"):
        in_lockstep(blocks, [go, lambda: fail(2), lambda: fail(1)])
    assert notes == [f"{what} {place}" for place in range(3) for what in ("enter", "leave")]
    notes.clear()
    go()
    assert len(notes) == 6


def test_a_base_in_memory_is_passed_on_the_callers_thread() -> None:
    """Fake tensors, among others, are a matter of the thread."""
    blocks = chain([], streamed=False)
    assert in_lockstep(blocks, [threading.get_ident] * 2) == [threading.get_ident()] * 2
    assert threading.get_ident() not in in_lockstep(chain([]), [threading.get_ident] * 2)
