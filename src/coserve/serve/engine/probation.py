"""Probation: work under way in a crashed engine is retried one item at a time.

All work under way in an engine that crashes becomes *suspect*. The next engine gets suspects one after the
other; each is on *trial* until it exceeds its progress at the crash (another token, optimizer step, or
reply), which clears it. A suspect on trial when an engine crashes again is tried first in the next one,
before other work. Work that was alone in a crashed engine, and had been in one before, is *guilty*.

Other work waits only while a suspect is tried alone, at most `ALONE_SECONDS` for each. An engine ended from
outside makes no suspects.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from coserve.core.request import Request
from coserve.errors import Quarantined

Kind = Literal["request", "adapter", "check", "job", "session"]
_LONG: Final[tuple[Kind, ...]] = ("job", "session")  # whose trials can take minutes
LASTING: Final[tuple[Kind, ...]] = ("job", "adapter")  # whose suspicion outlives the server's process
ALONE_SECONDS: Final = 20.0  # that other work waits for a suspect that is tried alone
_ALONE: Final = 2  # crashes after which a suspect is tried alone
_MOST_CRASHES: Final = 5  # most crashes of a suspect without progress, after which it is guilty
_LOOK_SECONDS: Final = 1.0  # between two looks at the clock
log = logging.getLogger(__name__)
_MOST_REQUESTS = 2  # guilty requests of one adapter, beyond which the adapter is guilty


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


@dataclass(frozen=True, slots=True)
class QuarantineVerdict:
    """Quarantined work and its reason; with the request, if it is one."""

    item: WorkItem
    reason: str
    request: Request | None = None


class Verdicts:
    """Refuses guilty work: requests equal to a guilty one except for id and seed, and passes equal to one
    except for their session. Other work is refused once, after which the database has the verdict."""

    def __init__(self) -> None:
        self._requests: dict[int, str] = {}
        self._passes: dict[int, str] = {}
        self._others: dict[WorkItem, str] = {}
        self._blamed: Counter[str] = Counter()  # adapters, by their requests that are guilty

    def find(
        self, item: WorkItem, request: Request | None, crash: str, pass_key: int | None = None
    ) -> list[QuarantineVerdict]:
        """Records an item as guilty of `crash`, in some cases with its adapter; `pass_key` is that of a
        session's pass under way."""
        why = f"the engine crashed again while it worked on this {item.kind}"
        found = [self._find(item, request, why, crash)]
        if pass_key is not None:
            self._passes[pass_key] = found[0].reason
        adapter = None if request is None else request.adapter
        if adapter is not None:
            self._blamed[adapter] += 1
            if self._blamed[adapter] >= _MOST_REQUESTS:
                why = "requests for this adapter crash the engine again and again"
                found.append(self._find(WorkItem("adapter", adapter), None, why, crash))
        return found

    def check_request(self, request: Request) -> None:
        """Raises Quarantined for a request equal to a guilty one but for id and seed."""
        if (reason := self._requests.get(_asked(request))) is not None:
            raise Quarantined(reason)

    @property
    def has_passes(self) -> bool:
        """Tells whether any pass is guilty, so that the key of others counts."""
        return bool(self._passes)

    def check_pass(self, key: int) -> None:
        """Raises Quarantined for a pass equal to a guilty one but for its session."""
        if (reason := self._passes.get(key)) is not None:
            raise Quarantined(reason)

    def check(self, item: WorkItem) -> None:
        """Raises Quarantined for work that was found guilty."""
        if (reason := self._others.pop(item, None)) is not None:
            raise Quarantined(reason)

    def _find(self, item: WorkItem, request: Request | None, why: str, crash: str) -> QuarantineVerdict:
        reason = f"{why} ({crash}): it is quarantined and not tried again; `coserve quarantine` lists it"
        log.error("quarantined: %s %s (%s)", item.kind, item.id, crash)
        if request is not None:
            self._requests[_asked(request)] = reason
        elif item.kind not in ("job", "session"):
            self._others[item] = reason
        return QuarantineVerdict(item, reason, request)


def _asked(request: Request) -> int:
    """A key equal for requests that differ in id and seed only."""
    sampling = repr(replace(request.sampling, seed=None))
    return hash((request.prompt, request.base, request.adapter, sampling))
