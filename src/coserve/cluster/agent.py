"""The queue of a block instance, as its worker's agent keeps it (BlockLLM, 6).

First in, first out, but rows of sequences whose pages are here go before those of others. A sequence that has
just passed, and goes on, keeps a place in the next batches until its countdown is over, so that a prompt does
not fill the batch which it comes back to. Rows are packed with their neighbours up to the batch size, and
nothing waits for a batch to be full. Pure Python: no torch, no clock but the one that is handed in.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from coserve.core.ranges import LARGEST, MOST_COUNT, check_range

Item = TypeVar("Item")
BATCH_ROWS: Final = 512
COUNTDOWN: Final = 0.05  # seconds in which a sequence is expected back
PATIENCE: Final = 0.5  # seconds after which what waits goes before sequences whose pages are here
STARVED: Final = 2.0  # seconds after which what waits goes before rows that are further on their way


@dataclass(frozen=True, slots=True)
class QueuedRows(Generic[Item]):
    """Rows of the sequences `keys` that wait at an instance since `since`; `has_pages` tells whether all of
    these have left pages there."""

    item: Item
    keys: frozenset[int]
    rows: int
    has_pages: bool
    since: float


def precedence(behind: int, since: float, now: float) -> tuple[bool, int, float]:
    """The sort key of an instance in which rows wait `since` some time, with so many layers or blocks
    `behind` it: a device that has several takes the rows first that are furthest on their way. So rows that
    came together stay together, and those that come meanwhile join them at the next token; in turn by age,
    each straggler would part them, and every part reads the weights of all blocks anew."""
    is_starved = now - since >= STARVED
    return not is_starved, 0 if is_starved else behind, since


class AgentQueue(Generic[Item]):
    """Rows that wait for one block instance, which passes `batch_rows` at once at most, but for rows that
    came together and are more. `countdown` and `patience` are in seconds."""

    def __init__(
        self, batch_rows: int = BATCH_ROWS, countdown: float = COUNTDOWN, patience: float = PATIENCE
    ) -> None:
        check_range("batch_rows", batch_rows, 1, MOST_COUNT, int)
        check_range("countdown", countdown, 0.0, LARGEST)
        check_range("patience", patience, 0.0, LARGEST)
        self._most, self._countdown, self._patience = batch_rows, countdown, patience
        self._waiting: deque[QueuedRows[Item]] = deque()
        self._due: dict[int, float] = {}  # when the countdown of a sequence is over

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return sum(one.rows for one in self._waiting)

    @property
    def oldest(self) -> float | None:
        """Since when the first one waits; None without any."""
        return min((one.since for one in self._waiting), default=None)

    def put(self, item: Item, keys: Iterable[int], rows: int, has_pages: bool, now: float) -> None:
        """Queues rows of some sequences."""
        self._waiting.append(QueuedRows(item, frozenset(keys), rows, has_pages, now))

    def expect(self, key: int, now: float) -> None:
        """Starts the countdown of a sequence that has passed and goes on."""
        self._due[key] = now + self._countdown

    def forget(self, keys: Iterable[int]) -> None:
        """Ends the countdowns of sequences that have ended."""
        for key in keys:
            self._due.pop(key, None)

    def drop(self, is_dropped: Callable[[Item], bool]) -> None:
        """Takes out items that no longer count."""
        self._waiting = deque(one for one in self._waiting if not is_dropped(one.item))

    def take(self, now: float) -> list[Item]:
        """The next batch, none where nothing waits. Of one sequence it has rows once: later ones attend to
        what the earlier ones leave."""
        if not self._waiting:
            return []
        self._due = {key: due for key, due in self._due.items() if due > now}
        here, first = set[int](), list[int]()  # places of those behind nobody of their own sequences
        for place, one in enumerate(self._waiting):
            if here.isdisjoint(one.keys):
                first.append(place)
            here |= one.keys
        kept = sum(key not in here for key in self._due)  # a row for each that is still to come back
        taken, rows = list[int](), 0
        for place in sorted(first, key=lambda place: self._rank(self._waiting[place], now)):
            one = self._waiting[place]
            room = self._most if one.has_pages else self._most - kept
            if not taken or rows + one.rows <= room:
                taken.append(place)
                rows += one.rows
        batch = [self._waiting[place] for place in taken]
        self._waiting = deque(one for place, one in enumerate(self._waiting) if place not in taken)
        self.forget(key for one in batch for key in one.keys)
        return [one.item for one in batch]

    def _rank(self, one: QueuedRows[Item], now: float) -> tuple[bool, float]:
        """The sort key of rows: first those that have waited for too long or whose pages are here, in their
        order."""
        return not (one.has_pages or now - one.since >= self._patience), one.since
