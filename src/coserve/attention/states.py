"""States of recurrent layers on the device: one of each mixer for every sequence, beside the sequence's
pages.

A *mixer* stands between a layer's input and output projections, as attention does; what a recurrent one has
seen of a sequence is a few tensors of fixed size. A state cannot be cut, and computing rows again from a
state that has already seen them is wrong, so a pass reads one half of the store and writes the other: the
halves of its sequences change places when the pass counts (`PassStates.commit`), and a pass that failed can
be run again.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.recurrent import StatePlaces

States = tuple[Tensor, ...]  # a mixer's, of sequences side by side: [sequences, ...] each


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a mixer's state, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RecurrentMixer(Protocol):
    """A recurrent mixer of a base, the module at `path` in layer `layer`, whose state is tensors of these
    `shapes`."""

    number: int
    layer: int
    path: str

    @property
    def shapes(self) -> Sequence[StateShape]: ...

    def graph_nbytes(self, rows: int) -> int:
        """Bytes that the graph of a window of so many rows keeps."""


class Core(Protocol):
    """A recurrent mixer between its projections, in one run of all rows. `number` is its place among the
    mixers of the base."""

    number: int

    def run(
        self, rows: slice, batch: int, before: States | None, trains: bool = False
    ) -> tuple[Tensor, States]:
        """Output [1, rows, width] of some of the run's rows, `batch` sequences of equal length one after the
        other, and the states after them. `before` are those before the rows; None is the state of a sequence
        that begins. A run of one row each may write into `before`. Where rows train,
        one after a state is computed by the code for several: that may differ (Zamba 2 and Nemotron H have a
        least time step in it alone)."""

    def update(self, rows: slice, states: Sequence[StatePlaces]) -> Tensor | None:
        """As `run` for one row each of sequences that go on, whose states are read and written where they
        lie; None, with nothing written, where no kernel does that."""

    def zeros(self, rows: int) -> Tensor:
        """The output of rows of no sequence."""


class StateStore:
    """States of all mixers for `sequences` sequences on a `device`, in two halves of which one has a
    sequence's current ones."""

    def __init__(
        self, mixers: Sequence[Sequence[StateShape]], sequences: int, device: torch.device, slots: int = 0
    ) -> None:
        """With so many `slots` for states that are kept beside those of sequences."""
        self.slots, self._first_slot = slots, 2 * sequences
        self._states = [
            tuple(
                torch.zeros(2 * sequences + slots, *own.shape, dtype=own.dtype, device=device)
                for own in shapes
            )
            for shapes in mixers
        ]
        self._current = [0] * sequences  # the half that has a sequence's state

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for states in self._states for state in states)

    def at(self, number: int, before: Tensor, after: Tensor) -> list[StatePlaces]:
        """A mixer's states at these places [n] before a pass and after it."""
        return [StatePlaces(state, before, after) for state in self._states[number]]

    def read(self, number: int, places: Tensor) -> States:
        """Copies of a mixer's states at these places [n]."""
        return tuple(state.index_select(0, places) for state in self._states[number])

    def write(self, number: int, places: Tensor, states: States) -> None:
        """Writes a mixer's states to these places [n]."""
        for held, state in zip(self._states[number], states, strict=True):
            held.index_copy_(0, places, state.to(held.dtype))

    def places(self, lines: Sequence[int], after: Container[int] = ()) -> Tensor:
        """Places [n] of the states of sequences by their lines; of those in `after` the ones that they have
        after the pass under way."""
        places = [2 * line + (self._current[line] ^ (line in after)) for line in lines]
        return torch.tensor(places, device=self._states[0][0].device)

    def keep(self, line: int, slot: int) -> None:
        """Copies the current states of a sequence to a slot."""
        self.copy(2 * line + self._current[line], self._first_slot + slot)

    def begin(self, line: int, slot: int) -> None:
        """Makes the states in a slot the current ones of a sequence."""
        self.copy(self._first_slot + slot, 2 * line + self._current[line])

    def copy(self, source: int, target: int) -> None:
        """Copies all mixers' states from one place to another."""
        for states in self._states:
            for state in states:
                state[target] = state[source]

    def read_bytes(self, place: int) -> Tensor:
        """The bytes of all mixers' states at a place, [bytes]."""
        held = [state[place].contiguous().flatten() for states in self._states for state in states]
        return torch.cat([state.view(torch.uint8) for state in held])

    def write_bytes(self, place: int, data: Tensor) -> None:
        """Fills a place with what `read_bytes` gave."""
        start = 0
        for state in (state for states in self._states for state in states):
            stop = start + state[place].nbytes
            own = data[start:stop].clone().view(state.dtype)  # a slice may begin at any byte
            state[place], start = own.view(state.shape[1:]), stop

    def turn(self, lines: Sequence[int]) -> None:
        """Makes the states that were written for these sequences their current ones."""
        for line in lines:
            self._current[line] ^= 1


@dataclass(frozen=True, slots=True)
class _MixerCall:
    """Rows of sequences of equal length in a pass: the places of their states before, which sequences that
    begin have none of, and after."""

    rows: slice
    batch: int
    before: Tensor | None
    after: Tensor


class PassStates:
    """The states of one pass's sequences, whose lines in the store are `lines`: decode rows in one call of
    each mixer, every chunk of a prompt in one of its own; `by_rows` each row alone, so that no bit depends on
    where a prompt is cut. Sequences on `begun` lines go on from an earlier pass that is not committed yet.
    Where `places` are given, of states before the pass and after it, they count instead of lines, and nothing
    is to be committed."""

    def __init__(
        self,
        store: StateStore,
        lines: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        by_rows: bool = False,
        begun: Container[int] = (),
        places: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`query_lens` are each sequence's rows in the pass, `seq_lens` its positions including them."""
        self._store, self._turned = store, [line for line in lines if line not in begun]
        self._calls = list[_MixerCall]()
        before, after = places or (store.places(lines, begun), store.places(lines, frozenset(lines)))
        start = 0
        if by_rows:
            self._calls, start = [*_single_rows(before, after, query_lens, seq_lens)], sum(query_lens)
        for first, count in () if by_rows else equal_lengths(query_lens, seq_lens):
            length = query_lens[first]
            rows, some = slice(start, start + count * length), slice(first, first + count)
            begins = seq_lens[first] == length
            self._calls.append(_MixerCall(rows, count, None if begins else before[some], after[some]))
            start = rows.stop
        self._rows = start

    def mix(self, core: Core, count: int) -> Tensor:
        """A mixer's output [1, count, width] for the pass's rows and padding behind them."""
        outputs = []
        for call in self._calls:
            out = None
            if call.before is not None and call.rows.stop - call.rows.start == call.batch:
                out = core.update(call.rows, self._store.at(core.number, call.before, call.after))
            if out is None:
                before = None if call.before is None else self._store.read(core.number, call.before)
                out, after = core.run(call.rows, call.batch, before)
                self._store.write(core.number, call.after, after)
            outputs.append(out)
        if count > self._rows:
            outputs.append(core.zeros(count - self._rows))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def commit(self) -> None:
        """Ends a pass that counts. May be called once."""
        self._store.turn(self._turned)


def _single_rows(
    before: Tensor, after: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> Iterator[_MixerCall]:
    """A call for each row; behind its first one a sequence goes on from the state after the pass."""
    start = 0
    for sequence, (length, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        own = slice(sequence, sequence + 1)
        for row in range(length):
            place = after[own] if row else before[own]
            begins = end == length and not row
            yield _MixerCall(slice(start, start + 1), 1, None if begins else place, after[own])
            start += 1


def equal_lengths(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(first sequence, sequences) of each call of a mixer: neighbours of equal length that all begin, or all
    go on."""
    found: list[tuple[int, int]] = []
    kinds: list[tuple[int, bool]] = []
    for sequence, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        kind = rows, rows == length
        if kinds and kinds[-1] == kind:
            first, count = found[-1]
            found[-1] = first, count + 1
        else:
            found.append((sequence, 1))
            kinds.append(kind)
    return found


def mixers_in(layer: int, mixers: Sequence[RecurrentMixer]) -> list[RecurrentMixer]:
    """The mixers of a layer."""
    return [mixer for mixer in mixers if mixer.layer == layer]


def state_nbytes(mixers: Sequence[RecurrentMixer]) -> int:
    """Bytes of the states of one sequence, in all mixers."""
    return sum(shape.nbytes for mixer in mixers for shape in mixer.shapes)
