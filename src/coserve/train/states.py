"""States of recurrent layers where a micro-batch's windows begin, and the gradients that are owed to them.

What keys and values are in attention (`train/kv.py`), a state is to a recurrent layer: a window that goes on
within an example begins with the state that the window before it left, is re-run from it on its way back, and
owes it a gradient, which waits for the window before. Every example begins without a state, so none sees its
neighbour.

States are kept behind every `STATE_ROWS` rows of a micro-batch and where windows end. So windows of any
number of rows may go forward, and others back, as long as they begin at such rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from torch import Tensor

from coserve.attention.states import Core, States, equal_lengths
from coserve.kernels.rows import concat_rows
from coserve.memory.arena import Lease
from coserve.train.window import Window

STATE_ROWS: Final = 128  # a chunk of transformers' recurrences has 64 or more, a tile of ours as many
StateGrads = tuple[Tensor | None, ...]  # of a mixer's state; None where nothing depends on a part of it


@dataclass(slots=True)
class _Kept:
    """A mixer's state at a row, and the gradient that it is owed."""

    states: States
    owed: StateGrads | None = None


class MicroBatchStates:
    """States of all mixers at the rows of a micro-batch where windows may begin within an example. `lengths`
    are those of its examples."""

    def __init__(self, lengths: Sequence[int], lease: Lease) -> None:
        self._lengths, self._ends = tuple(lengths), frozenset(accumulate(lengths))
        self._lease = lease
        self._kept: dict[tuple[int, int], _Kept] = {}  # by mixer and row

    def parts(self, window: Window) -> list[Window]:
        """A window, cut where states are kept."""
        start, stop = window.span.start, window.span.stop
        inner = range((start // STATE_ROWS + 1) * STATE_ROWS, stop, STATE_ROWS)
        if not inner:
            return [window]
        return [Window.of(self._lengths, a, b - a) for a, b in pairwise((start, *inner, stop))]

    def save(self, number: int, window: Window, after: States) -> None:
        """Stores the state [1, ...] of mixer `number` after a window, where its last example goes on."""
        if (end := window.span.stop) in self._ends:
            return
        key = number, end
        if key not in self._kept:
            self._kept[key] = _Kept(tuple(self._lease.take(x.shape, x.dtype, x.device) for x in after))
        for held, x in zip(self._kept[key].states, after, strict=True):
            held.copy_(x)

    def before(self, number: int, window: Window) -> States | None:
        """The state [1, ...] of mixer `number` before a window; None where an example begins there."""
        return self._kept[number, window.start].states if window.past else None

    def owe(self, number: int, window: Window, grads: StateGrads) -> None:
        """Keeps what a window owes to its state, and frees what was owed to it."""
        if behind := self._kept.get((number, window.span.stop)):
            behind.owed = None
        if window.past:
            self._kept[number, window.start].owed = grads

    def owed(self, number: int, window: Window) -> StateGrads | None:
        """The gradient of mixer `number`'s state after a window, from the window behind it; None if none."""
        kept = self._kept.get((number, window.span.stop))
        return None if kept is None else kept.owed


def mix_window(core: Core, window: Window, start: int, before: States | None) -> tuple[Tensor, States]:
    """A mixer's output [1, window rows, width] for a window's rows, which begin at row `start` of the run:
    the first example goes on from `before`. And the state [1, ...] of the last one."""
    assert not (window.prompt or window.before), (
        "no adapter of a base with recurrent layers has virtual tokens"
    )
    outputs: list[Tensor] = []
    after: States = ()
    ends = [window.pieces[0] + window.past, *window.pieces[1:]]
    for first, count in equal_lengths(window.pieces, ends):
        stop = start + count * window.pieces[first]
        out, after = core.run(slice(start, stop), count, before if first == 0 else None, trains=True)
        outputs.append(out)
        start = stop
    return concat_rows(outputs, 1), tuple(x[-1:] for x in after)
