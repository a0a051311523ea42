"""States of recurrent layers on the workers of a cluster.

A state is named by a sequence and the number of its tokens that it has seen. An instance has numbered places
for states, two of each sequence and some that are kept for later prompts, and knows the name of the state at
each. A pass reads one place and writes another, so rows whose worker was lost pass again from the state
before them. A pass that names a state which is not at its place fails, and writes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from coserve.attention.states import PassStates, RecurrentMixer, StateStore, state_nbytes
from coserve.cluster.messages import LoadBlock, MovedState, RowSegment, StateStep
from coserve.core.plan import StateMove
from coserve.errors import RequestError

StateName: TypeAlias = tuple[int, int]  # a sequence's key, and the tokens before the state


class BlockStates:
    """The states of a block's `mixers` at the places of an instance. One thread at a time changes them."""

    def __init__(self, mixers: Sequence[RecurrentMixer], asked: LoadBlock, device: torch.device) -> None:
        self._store = StateStore([mixer.shapes for mixer in mixers], asked.sequences, device, asked.slots)
        self._device, self._places = device, 2 * asked.sequences + asked.slots
        self._names: dict[int, StateName] = {}
        self.nbytes, self.state_nbytes = self._store.nbytes, state_nbytes(mixers)

    def of_pass(self, segments: Sequence[RowSegment], steps: Sequence[StateStep]) -> PassStates:
        """The states of a pass's sequences. Raises RequestError where one is not there."""
        for segment, step in zip(segments, steps, strict=True):
            self._check(step.after, *([] if step.kept < 0 else [step.kept]))
            if (step.before < 0) is not (segment.context == 0) or step.before == step.after:
                raise RequestError(f"rows behind {segment.context} tokens, and states at {step.before}")
            if segment.context:
                self._expect(step.before, (step.name, segment.context))
        for step in steps:
            self._names.pop(step.after, None)
            self._names.pop(step.kept, None)
        ends = [segment.context + segment.length for segment in segments]
        before = torch.tensor([max(step.before, 0) for step in steps], device=self._device)
        after = torch.tensor([step.after for step in steps], device=self._device)
        lengths = [segment.length for segment in segments]
        return PassStates(self._store, (), lengths, ends, places=(before, after))

    def passed(self, segments: Sequence[RowSegment], steps: Sequence[StateStep]) -> None:
        """Names the states behind rows that have passed, and keeps those that are to be kept."""
        for segment, step in zip(segments, steps, strict=True):
            name = segment.key, segment.context + segment.length
            self._names[step.after] = name
            if step.kept >= 0:
                self._store.copy(step.after, step.kept)
                self._names[step.kept] = name

    def read(self, moved: MovedState) -> Tensor:
        """The bytes [1, bytes] of a state. Raises RequestError where it is not there."""
        self._expect(moved.place, (moved.key, moved.tokens))
        return self._store.read_bytes(moved.place).cpu()[None]

    def write(self, moved: MovedState, data: Tensor) -> None:
        """Fills a place with bytes that `read` of another instance gave. Raises RequestError."""
        self._check(moved.into)
        if tuple(data.shape) != (1, self.state_nbytes) or data.dtype != torch.uint8:
            raise RequestError(f"{tuple(data.shape)} bytes are not those of this block's states")
        self._store.write_bytes(moved.into, data[0].to(self._device))
        self._names[moved.into] = moved.key, moved.tokens

    def _check(self, *places: int) -> None:
        if max(places) >= self._places:
            raise RequestError(f"states at place {max(places)}, and this instance has {self._places} places")

    def _expect(self, place: int, name: StateName) -> None:
        if self._names.get(place) != name:
            raise RequestError(f"the states of sequence {name[0]} behind {name[1]} tokens are not at {place}")


class HeldStates:
    """The scheduler's record of the states that an instance has: names by place. What may have been written
    over is not in it."""

    def __init__(self) -> None:
        self._names: dict[int, StateName] = {}
        self._places: dict[StateName, list[int]] = {}

    def find(self, name: StateName) -> int | None:
        """A place with a state; None where none has it."""
        return next(iter(self._places.get(name, ())), None)

    def put(self, place: int, name: StateName) -> None:
        """Notes that a place has a state."""
        self.drop(place)
        self._names[place] = name
        self._places.setdefault(name, []).append(place)

    def drop(self, place: int) -> None:
        """Notes that a place is written."""
        if (name := self._names.pop(place, None)) is not None:
            self._places[name].remove(place)
            if not self._places[name]:
                del self._places[name]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The states of one sequence in a pass: the places of its own are 2 * `line` and the next one; `name` is
    that of the state before its rows, None where it begins; `kept` is where the one behind them is kept, -1
    for none."""

    line: int = 0
    name: StateName | None = None
    kept: int = -1


class SequenceStates:
    """The scheduler's record of the states that sequences begin with and that slots have. Plans with moves of
    states run alone."""

    def __init__(self, asked: LoadBlock) -> None:
        self._first_slot = 2 * asked.sequences
        self._slots: dict[int, StateName] = {}
        self._begun: dict[int, StateName] = {}  # what sequences began with, by key
        self._keeps: dict[int, int] = {}  # places by key, of the newest plan

    def take_up(self, moves: Iterable[StateMove]) -> None:
        """Takes up the moves of a plan. What it reads is not written over by it: a state that is to be kept
        there is computed again where somebody begins with it."""
        moves = list(moves)
        for move in (move for move in moves if not move.keeps):
            self._begun[move.key] = self._slots.get(move.slot, (move.key, -1))
        read = {move.slot for move in moves if not move.keeps}
        self._keeps = {m.key: self._first_slot + m.slot for m in moves if m.keeps and m.slot not in read}

    def plan(self, key: int, line: int, context: int, length: int) -> StatePlan:
        """The states of a sequence's rows in the newest plan."""
        kept = self._keeps.get(key, -1)
        if kept >= 0:
            self._slots[kept - self._first_slot] = key, context + length
        return StatePlan(line, self._name(key, context) if context else None, kept)

    def _name(self, key: int, tokens: int) -> StateName:
        begun = self._begun.get(key)
        return begun if begun is not None and begun[1] == tokens else (key, tokens)

    def earlier(self, key: int, name: StateName) -> list[StateName]:
        """Names of states of a sequence that were kept, behind fewer tokens than the one of this name."""
        begun = [self._begun[key]] if key in self._begun else []
        found = (*begun, *(own for own in self._slots.values() if own[0] == name[0]))
        return [own for own in found if 0 < own[1] < name[1]]

    def end(self, key: int) -> None:
        """A sequence has ended."""
        self._begun.pop(key, None)
