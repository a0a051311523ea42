"""Probation: work under way in a crashed engine is retried one item at a time.

All work under way in an engine that crashes becomes *suspect*. The next engine gets suspects one after the
other; each is on *trial* until it exceeds its progress at the crash (another token, optimizer step, or
reply), which clears it. A suspect on trial when an engine crashes again is tried first in the next one,
before other work. Work that was alone in a crashed engine, and had been in one before, is *guilty*.

Other work waits only while a suspect is tried alone, at most `ALONE_SECONDS` for each. An engine ended from
outside makes no suspects.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Kind = Literal["request", "adapter", "check", "job", "session"]
_LONG: Final[tuple[Kind, ...]] = ("job", "session")  # whose trials can take minutes
LASTING: Final[tuple[Kind, ...]] = ("job", "adapter")  # whose suspicion outlives the server's process
ALONE_SECONDS: Final = 20.0  # that other work waits for a suspect that is tried alone
_ALONE: Final = 2  # crashes after which a suspect is tried alone
_MOST_CRASHES: Final = 5  # most crashes of a suspect without progress, after which it is guilty
_LOOK_SECONDS: Final = 1.0  # between two looks at the clock


class WorkItem(NamedTuple):
    """Work of an engine: a request, an adapter load, a check, a job, or the work under way of a training
    session."""

    kind: Kind
    id: str


@dataclass(slots=True)
class Suspect:
    """Work present at `crashes` crashes without exceeding `progress` since."""

    crashes: int
    progress: int


class Probation:
    """Tracks the work under way in the current engine, and suspects of earlier crashes.

    `progress` is any number that grows: tokens of an answer, optimizer steps of a job, replies to a session.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects: dict[WorkItem, Suspect] = {}
        self._clock = clock
        self._under_way: dict[WorkItem, int] = {}
        self._trial: WorkItem | None = None
        self._alone_until = 0.0
        self._waiting: set[WorkItem] = set()
        self._changed = asyncio.Event()

    def is_open(self, item: WorkItem) -> bool:
        """Tells whether an item may be sent to the engine now."""
        suspect = self.suspects.get(item)
        if self._trial is not None and self._trial != item and suspect is not None:
            return False
        own = 0 if suspect is None else suspect.crashes
        most = max((other.crashes for other in self.suspects.values()), default=0)
        if most >= _ALONE and self._clock() < self._alone_until:
            return own == most
        is_long = suspect is not None and item.kind in _LONG  # short trials come first
        return not (is_long and any(other.kind not in _LONG for other in self._waiting))

    async def turn(self, item: WorkItem) -> None:
        """Waits until an item may be sent to the engine, which must follow at once."""
        self._waiting.add(item)
        try:
            while not self.is_open(item):
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._changed.wait()
        finally:
            self._waiting.discard(item)
            self._changed.set()

    def enter(self, item: WorkItem, progress: int = -1) -> None:
        """Notes that an item is sent to the engine. A suspect, after its `turn`, is then on trial."""
        self._under_way[item] = progress
        if item in self.suspects:
            self._trial = item
            self._alone_until = self._clock() + ALONE_SECONDS

    def moved(self, item: WorkItem, progress: int) -> None:
        """Notes an item's progress."""
        if item not in self._under_way:
            return
        self._under_way[item] = progress
        suspect = self.suspects.get(item)
        if suspect is not None and progress > suspect.progress:
            self._clear(item)

    def left(self, item: WorkItem) -> None:
        """Notes that an item has ended or was cancelled."""
        self._under_way.pop(item, None)
        self._clear(item)

    def forget_engine(self) -> None:
        """Drops the work under way without suspicion: the engine was ended from outside, or only its
        connection is lost."""
        self._under_way.clear()
        self._trial = None
        self._alone_until = self._clock() + ALONE_SECONDS
        self._changed.set()

    def crashed(self) -> list[WorkItem]:
        """Returns the items guilty of the engine's crash; others under way become suspects."""
        guilty = []
        is_certain = len(self._under_way) == 1
        for item, progress in self._under_way.items():
            before = self.suspects.pop(item, None)
            crashes = 1 if before is None else before.crashes + 1
            if (is_certain and before is not None) or crashes >= _MOST_CRASHES:
                guilty.append(item)
            else:
                self.suspects[item] = Suspect(crashes, progress)
        self.forget_engine()
        return guilty

    def _clear(self, item: WorkItem) -> None:
        was = self.suspects.pop(item, None)
        if self._trial == item:
            self._trial = None
        if was is not None:
            self._changed.set()
