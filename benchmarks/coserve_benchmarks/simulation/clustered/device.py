"""Devices and links of a simulated cluster: each does one thing at a time, in order."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count


class VirtualEvents:
    """A clock, and what happens at which time; of two things at one time the one that was said first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, then: float, happens: Callable[[], None]) -> None:
        """Has something happen at a time, which is not past."""
        heappush(self._heap, (max(then, self.now), next(self._numbers), happens))

    def step(self) -> bool:
        """Lets the next thing happen; False where there is none."""
        if not self._heap:
            return False
        self.now, _, happens = heappop(self._heap)
        happens()
        return True


@dataclass(slots=True)
class Wire:
    """A link in one direction, on which bytes go one after the other."""

    rate: float
    latency: float
    free_at: float = 0.0
    nbytes: float = 0.0

    def send(self, events: VirtualEvents, nbytes: float, arrives: Callable[[], None]) -> float:
        """Sends bytes; `arrives` is called when the last is there. Returns the seconds that they are under
        way, those in which they wait included."""
        begun = max(events.now, self.free_at)
        self.free_at = begun + nbytes / self.rate
        self.nbytes += nbytes
        events.at(self.free_at + self.latency, arrives)
        return self.free_at + self.latency - events.now


@dataclass(slots=True)
class WaitingRows:
    """Rows that wait at an instance: whose, how many, since when, and whether their pages are there; `behind`
    are the blocks that they have to pass after it."""

    key: int
    rows: int
    since: float
    returns: bool
    behind: int
    group: str = ""  # the application


@dataclass(slots=True)
class SimulatedInstance:
    """A block in a device's memory from `ready_at` on: first those that return to their pages, then others,
    each in order (BlockLLM, 6)."""

    content: str
    ready_at: float
    returning: deque[WaitingRows] = field(default_factory=deque)
    others: deque[WaitingRows] = field(default_factory=deque)
    under_way: list[WaitingRows] = field(default_factory=list)
    last_used: float = 0.0
    queued_rows: int = 0

    @property
    def first(self) -> WaitingRows | None:
        """The rows that are next."""
        return self.returning[0] if self.returning else self.others[0] if self.others else None

    def batches(self, most: int) -> tuple[int, ...]:
        """Rows of the batch under way and of those that the queue makes, `most` rows each."""
        if not self.queued_rows and not self.under_way:
            return ()
        full, rest = divmod(self.queued_rows, most)
        parts = (sum(one.rows for one in self.under_way), *[most] * full, rest)
        return tuple(rows for rows in parts if rows)

    def put(self, waiting: WaitingRows) -> None:
        """Queues rows."""
        (self.returning if waiting.returns else self.others).append(waiting)
        self.queued_rows += waiting.rows

    def take(self, most: int) -> list[WaitingRows]:
        """The rows of the next pass: neighbours in the queue, as many as fit; one request's rows at least."""
        taken: list[WaitingRows] = []
        for line in (self.returning, self.others):
            while line and (not taken or sum(one.rows for one in taken) + line[0].rows <= most):
                taken.append(line.popleft())
        self.queued_rows -= sum(one.rows for one in taken)
        self.under_way = taken
        return taken
