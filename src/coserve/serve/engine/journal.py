"""The journal of a training session: the commands that the next engine repeats to restore it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from coserve.errors import CoserveError, RequestError

Change = Literal["pass", "step", "load"]
STEPS: Final = 32  # optimizer steps to repeat, after which a state is to be kept
BYTES: Final = 16 * 2**20  # of commands to repeat, likewise
MOST_BYTES: Final = 64 * 2**20  # of commands that a journal holds


@dataclass(slots=True, eq=False)
class Entry:
    """A command as it was sent, by its `ref`, which grows from one to the next. A command that `failed` fails
    again when it is repeated."""

    ref: int
    packed: msgspec.Raw
    change: Change
    failed: bool = False

    @property
    def nbytes(self) -> int:
        return memoryview(self.packed).nbytes


class Journal:
    """A session's backward passes, optimizer steps and loads since the newest state that its server keeps.

    Repeated in order on a fresh session they restore its weights, moments and accumulated gradients, as far
    as sums in another order of rows are the same. Beyond `MOST_BYTES` all passes are dropped. The journal
    then `is_lost`, until a state is kept that needs none of them.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._nbytes = 0
        self._lost = 0  # ref of the newest pass that was dropped
        self._steps = self._recent = 0  # optimizer steps, and bytes, since a state was last asked for

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def is_lost(self) -> bool:
        """Tells whether a pass is missing."""
        return self._lost > 0

    def add(self, ref: int, packed: msgspec.Raw, change: Change) -> None:
        """Adds a command that is being sent."""
        entry = self._entries[ref] = Entry(ref, packed, change)
        self._recent += entry.nbytes
        self._nbytes += entry.nbytes
        if self._nbytes > MOST_BYTES:
            self._lost = max(self._lost, *(one.ref for one in self if one.change == "pass"), 0)
            self._keep_only([one for one in self if one.change != "pass"])

    def ended(self, ref: int, error: CoserveError | None) -> None:
        """Notes a command's reply. One that was refused changed nothing; an optimizer step that failed
        otherwise has dropped the gradients before it. After a load all before it is superfluous."""
        if (entry := self._entries.get(ref)) is None:
            return
        entry.failed = error is not None
        if error is not None and (entry.change != "step" or isinstance(error, RequestError)):
            self._keep_only([one for one in self if one is not entry])
        elif entry.change == "load":
            self._begin_with(entry, ref)
        elif entry.change == "step":
            self._steps += 1

    def wants_state(self) -> bool:
        """Tells whether a state is to be kept now. It is False again until as many commands have been
        added."""
        is_much = self._steps >= STEPS or self._recent >= BYTES or self.is_lost
        if not (self._steps and is_much):
            return False
        self._steps, self._recent = 0, 0
        return True

    def kept(self, save: int, load: msgspec.Raw) -> None:
        """Has the journal begin with `load`, of a state that the command `save` wrote. A state has no
        accumulated gradients, so passes since the step before `save` stay."""
        last = max((one.ref for one in self if one.ref < save and one.change != "pass"), default=0)
        self._begin_with(Entry(last, load, "load"), last)

    def _begin_with(self, load: Entry, after: int) -> None:
        """Keeps `load`, and of the others only those after the command `after`."""
        self._keep_only([load, *(one for one in self if one.ref > after and one is not load)])
        if self._lost <= after:
            self._lost = 0

    def _keep_only(self, entries: list[Entry]) -> None:
        self._entries = {one.ref: one for one in entries}
        self._nbytes = sum(one.nbytes for one in entries)
