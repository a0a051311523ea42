"""States of recurrent layers that are kept for later prompts.

A page has the keys and values of its tokens; the state behind it is that of all tokens before, and cannot be
cut. So it is kept at some positions only, all at the end of a page: every `EVERY` tokens of a prompt, and at
its last page's beginning. A prompt is cut there. What is kept is known by the name of the page before it
(`schedule.prefixes`), and a later prompt begins at the last position of which both pages and state are found.

The state of a preempted sequence whose pages go to the second tier is set aside in such a place, too.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import Final

from coserve.core.plan import StateMove
from coserve.core.sequence import Sequence

EVERY: Final = 512  # tokens
_LEAST: Final = 64  # tokens of a prompt that are worth a pass more


def next_cut(sequence: Sequence, page_size: int) -> int:
    """The first position behind a sequence's computed tokens where its state is kept, or its end."""
    prompt, every = len(sequence.request.prompt), _every(page_size)
    behind = (sequence.computed // every + 1) * every
    last = (prompt - 1) // page_size * page_size
    if sequence.computed < last < behind and last - sequence.computed >= _LEAST:
        return last
    return behind if behind < prompt else sequence.length


def is_kept(sequence: Sequence, end: int, page_size: int) -> bool:
    """Tells whether the state behind the first `end` tokens of a sequence is kept."""
    left = len(sequence.request.prompt) - end
    return left > 0 and end % page_size == 0 and (end % _every(page_size) == 0 or left <= page_size)


def _every(page_size: int) -> int:
    return max(EVERY // page_size, 1) * page_size


class KeptStates:
    """The names of the states in so many `slots` of a device, least recently used first; those that were set
    aside have numbers. A plan that writes one is under way until `written`; one that a sequence is to begin
    with, or that is set aside for it, is not written before `begin`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = [*range(slots)]
        self._found: OrderedDict[bytes | int, int] = OrderedDict()
        self._coming: dict[int, bytes | int] = {}  # names by slots that plans under way write
        self._held: dict[int, int] = {}  # slots by sequences that will begin with them
        self._aside: dict[int, int] = {}  # slots by sequences with a copy in the second tier
        self._leaving: list[StateMove] = []  # of the next plan
        self._numbers = count()

    def __len__(self) -> int:
        """Slots with a state, or for one that a plan under way writes."""
        return self.slots - len(self._free)

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    def hold(self, sequence: Sequence, name: bytes) -> None:
        """Keeps a state until the sequence begins with it."""
        self._found.move_to_end(name)
        self._held[sequence.key] = self._found[name]

    def let_go(self, sequence: Sequence) -> None:
        """Ends `hold` for a sequence that will not begin."""
        self._held.pop(sequence.key, None)

    def begin(self, sequence: Sequence) -> StateMove:
        """Copies the state that was held to a sequence that begins."""
        slot = self._held.pop(sequence.key)
        self.forget(sequence)
        return StateMove(sequence.key, slot, False)

    def set_aside(self, sequence: Sequence) -> bool:
        """Has the next plan keep the state of a sequence that is preempted, for `bring_back`; False where all
        slots are in use."""
        slot = self._held.get(sequence.key)  # of one that has not begun again
        if slot is None:
            moves = self.keep(sequence, next(self._numbers))
            if not moves:
                return False
            self._leaving += moves
            slot = moves[0].slot
        self._aside[sequence.key] = slot
        return True

    def bring_back(self, sequence: Sequence) -> None:
        """As `hold`, of the state that was set aside."""
        self._held[sequence.key] = self._aside[sequence.key]

    def forget(self, sequence: Sequence) -> None:
        """Frees the state that was set aside for a sequence, if one was."""
        slot = self._aside.pop(sequence.key, None)
        name = next((one for one, place in self._found.items() if place == slot), None)
        if isinstance(name, int):  # others may be found by their names
            self._free.append(self._found.pop(name))

    def take_leaving(self) -> list[StateMove]:
        """Moves of states that were set aside since the last plan."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def keep(self, sequence: Sequence, name: bytes | int) -> list[StateMove]:
        """Copies the state of a sequence to a slot; none where it is there, or all slots are in use."""
        if name in self._found or name in self._coming.values():
            return []
        if not self._free:
            held = {*self._held.values(), *self._aside.values()}
            oldest = next((one for one, slot in self._found.items() if slot not in held), None)
            if oldest is None:
                return []
            self._free.append(self._found.pop(oldest))
        slot = self._free.pop()
        self._coming[slot] = name
        return [StateMove(sequence.key, slot, True)]

    def written(self, moves: Iterable[StateMove], lost: Iterable[int]) -> None:
        """Has the states found that a plan has kept, but for those of sequences whose rows were lost."""
        gone = set(lost)
        for move in moves:
            if move.keeps:
                name = self._coming.pop(move.slot)
                if move.key in gone:
                    self._free.append(move.slot)
                else:
                    self._found[name] = move.slot
