"""Which of many adapters are in memory: as many as fit by bytes, the least recently used one out first.

Users *hold* what they use while they use it; it stays meanwhile, and so does what is pinned. Everything else
is there because it may be asked for again, and leaves for what is asked for now. What is wanted and not there
comes in the order in which it is wanted. Where all bytes are held, the first of these has a *claim*: the
least recently used ones are closed to new users until it has its bytes, so that a stream of requests for
those that are there cannot keep it out for ever. Whoever uses the others goes on.

Plain numbers: what loads and drops is the `Mover`'s business.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

from coserve.core.size import show_size
from coserve.errors import OutOfMemory

AT_ONCE: Final = 2  # that are on their way: one is read, the next one's bytes are there already


class Item(Protocol):
    """Something that is in memory or is not; `cost` are the bytes that it takes there."""

    @property
    def key(self) -> str: ...

    @property
    def cost(self) -> int: ...


I = TypeVar("I", bound=Item)  # noqa: E741
M = TypeVar("M", bound=Item, contravariant=True)


class Mover(Protocol[M]):
    """Moves what it is told to."""

    def load(self, item: M) -> None:
        """Begins to bring it in; `arrived` or `failed` is called when that is over."""
        ...

    def drop(self, item: M) -> None:
        """Frees its bytes, now."""
        ...


class Place(Enum):
    """Places of an item."""

    OUT = "disk"
    COMING = "loading"
    IN = "memory"


@dataclass(slots=True, eq=False)
class _Entry(Generic[I]):
    item: I
    place: Place = Place.OUT
    users: set[int] = field(default_factory=set)
    failed: bool = False  # the last time; it is not brought in for its pin alone


class AdapterCache(Generic[I]):
    """Keeps `room()` bytes in use at most. Everything happens in one thread."""

    def __init__(self, mover: Mover[I], room: Callable[[], int]) -> None:
        self._mover, self._room = mover, room
        self._entries: dict[str, _Entry[I]] = {}
        self._inside: OrderedDict[str, _Entry[I]] = OrderedDict()  # that have bytes; the latest used last
        self._pinned: dict[str, None] = {}  # in the order in which they were
        self._closed: list[str] = []  # to new users: they leave for whoever has the claim
        self.used = 0  # bytes of all that are in memory, or on their way

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def place(self, key: str) -> Place:
        """The place of an item."""
        return self._entries[key].place

    @property
    def inside(self) -> tuple[str, ...]:
        """Items in memory, the least recently used first."""
        return tuple(key for key, entry in self._inside.items() if entry.place is Place.IN)

    @property
    def items(self) -> tuple[I, ...]:
        """Items that have bytes: those in memory, and those on their way."""
        return tuple(entry.item for entry in self._inside.values())

    @property
    def pinned(self) -> tuple[str, ...]:
        """Items that stay once they are in memory."""
        return tuple(self._pinned)

    def pinned_with(self, key: str) -> int:
        """Bytes of all that are pinned, and of this one."""
        return sum(self._entries[each].item.cost for each in {*self._pinned, key})

    # What there is

    def add(self, item: I) -> None:
        """An item that lies on disk."""
        assert item.key not in self._entries, f"there is {item.key} already"
        self._entries[item.key] = _Entry(item)

    def forget(self, key: str) -> None:
        """Nobody will want it any more. One that is on its way has its bytes until it arrives."""
        entry = self._entries.pop(key)
        assert not entry.users, f"{key} is forgotten while it is held"
        self._pinned.pop(key, None)
        if entry.place is Place.IN:
            self._leave(entry)

    def pin(self, key: str, pinned: bool = True) -> None:
        """A pinned item is brought in when there is room, and stays."""
        self._entries[key].failed = False
        if not pinned:
            self._pinned.pop(key, None)
            return
        self._pinned[key] = None
        if key in self._closed:
            self._closed.remove(key)

    # Users

    def hold(self, key: str, user: int) -> bool:
        """Tells whether it is there, and stays until this user releases it."""
        entry = self._entries[key]
        if entry.place is not Place.IN or key in self._closed:
            return False
        entry.users.add(user)
        self._inside.move_to_end(key)
        return True

    def release(self, key: str, user: int) -> None:
        """The user does not need it any more, whether it held it or not."""
        entry = self._entries.get(key)
        if entry is not None and user in entry.users:
            entry.users.remove(user)
            self._inside.move_to_end(key)

    # Movement

    def advance(self, wanted: Iterable[str]) -> list[tuple[str, OutOfMemory]]:
        """Brings in what is wanted, the most urgent first, as far as bytes go; then what is pinned.

        Returns those for which there will be no room whoever leaves, each with what to say about it.
        """
        refused: list[tuple[str, OutOfMemory]] = []
        ahead: set[str] = set()
        wants = dict.fromkeys(wanted)
        pins = [key for key in self._pinned if key not in wants and not self._entries[key].failed]
        for key in chain(wants, pins):
            entry = self._entries[key]
            if entry.place is Place.OUT:
                if self._coming() >= AT_ONCE:
                    return refused
                if missing := self._never(entry):
                    if key in wants:
                        refused.append((key, self._refusal(entry, missing)))
                    continue
                if not self._make_room(entry, ahead):
                    return refused
                self._enter(entry)
            elif key in self._closed:  # asked for more urgently than what it was to leave for
                self._closed.remove(key)
            ahead.add(key)
        self._closed.clear()
        return refused

    def arrived(self, key: str) -> bool:
        """Notes that an item is in memory; False if it was forgotten meanwhile, and is to be dropped."""
        entry = self._inside[key]
        if self._entries.get(key) is not entry:
            self._leave(entry)
            return False
        entry.place, entry.failed = Place.IN, False
        self._inside.move_to_end(key)
        return True

    def failed(self, key: str) -> None:
        """Notes that an item could not be loaded. It may be tried again."""
        entry = self._inside[key]
        self._leave(entry)
        entry.failed = True

    def shed(self, nbytes: int) -> None:
        """Drops what nobody uses until so many bytes are free, if that is enough for so many."""
        idle, least = self._idle(()), self.used - nbytes
        if _cost(idle) < nbytes:
            return
        for entry in idle:
            if self.used <= least:
                return
            self._drop(entry)

    # Inside

    def _coming(self) -> int:
        return sum(entry.place is Place.COMING for entry in self._inside.values())

    def _never(self, entry: _Entry[I]) -> int:
        """Bytes that would be missing if all left that may."""
        held = _cost(self._inside[key] for key in self._pinned if key in self._inside)
        return max(held + entry.item.cost - self._room(), 0)

    def _refusal(self, entry: _Entry[I], missing: int) -> OutOfMemory:
        return OutOfMemory(
            f"the adapter needs {show_size(entry.item.cost)} of memory, {show_size(missing)} more than "
            f"adapters may have beside {len(self.pinned)} that are pinned: unpin some, let jobs end, or "
            "raise engine.adapter_memory"
        )

    def _make_room(self, entry: _Entry[I], ahead: Collection[str]) -> bool:
        """Tells whether there are bytes for it, once those have been dropped that nobody uses. If not it has
        the claim; `ahead` are wanted more urgently."""
        missing = self.used + entry.item.cost - self._room()
        if missing <= 0:
            return True
        idle = self._idle(ahead)
        if _cost(idle) < missing:
            self._claim(missing, ahead)
            return False
        for other in sorted(idle, key=lambda e: e.item.key not in self._closed):  # in their order otherwise
            if self.used + entry.item.cost <= self._room():
                break
            self._drop(other)
        return True

    def _claim(self, missing: int, ahead: Collection[str]) -> None:
        """Closes so many that their bytes are enough, those first that are closed already."""
        others = [
            key
            for key, entry in self._inside.items()
            if entry.place is Place.IN and key not in (*self._pinned, *self._closed, *ahead)
        ]
        order, self._closed = [*self._closed, *others], []
        for key in order:
            if missing <= 0:
                return
            self._closed.append(key)
            missing -= self._inside[key].item.cost

    def _idle(self, ahead: Collection[str]) -> Sequence[_Entry[I]]:
        """Items that could leave now, the least recently used first."""
        return [
            entry
            for key, entry in self._inside.items()
            if entry.place is Place.IN and not entry.users and key not in self._pinned and key not in ahead
        ]

    def _enter(self, entry: _Entry[I]) -> None:
        self.used += entry.item.cost
        self._inside[entry.item.key] = entry
        entry.place = Place.COMING
        self._mover.load(entry.item)

    def _drop(self, entry: _Entry[I]) -> None:
        self._leave(entry)
        self._mover.drop(entry.item)

    def _leave(self, entry: _Entry[I]) -> None:
        key = entry.item.key
        del self._inside[key]
        if key in self._closed:
            self._closed.remove(key)
        self.used -= entry.item.cost
        entry.place = Place.OUT


def _cost(entries: Iterable[_Entry[I]]) -> int:
    return sum(entry.item.cost for entry in entries)
