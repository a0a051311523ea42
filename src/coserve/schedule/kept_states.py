"""States of recurrent layers that are kept for later prompts.

A page has the keys and values of its tokens; the state behind it is that of all tokens before, and cannot be
cut. So it is kept at some positions only, all at the end of a page: every `EVERY` tokens of a prompt, and at
its last page's beginning. A prompt is cut there. What is kept is known by the name of the page before it
(`schedule.naming`), and a later prompt begins at the last position of which both pages and state are found.
"""

from collections import OrderedDict
from collections.abc import Iterable
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
    """The names of the states in so many `slots` of a device, least recently used first. A plan that writes
    one is under way until `written`; one that a sequence is to begin with is not written before `begin`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = [*range(slots)]
        self._found: OrderedDict[bytes, int] = OrderedDict()
        self._coming: dict[int, bytes] = {}  # names by slots that plans under way write
        self._held: dict[int, int] = {}  # slots by sequences that will begin with them

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
        return StateMove(sequence.key, self._held.pop(sequence.key), False)

    def keep(self, sequence: Sequence, name: bytes) -> list[StateMove]:
        """Copies the state of a sequence to a slot; none where it is there, or all slots are in use."""
        if name in self._found or name in self._coming.values():
            return []
        if not self._free:
            held = set(self._held.values())
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
