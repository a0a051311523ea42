"""Finds children that hang: stopped by a signal, or with a loop that no longer runs."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coserve.serve.processes.process import ChildProcess

LOOK_SECONDS = 0.5  # between two looks
STOPPED_SECONDS = 5.0  # most that a process may be stopped by a signal
START_SECONDS = (
    60.0  # of silence while a child starts: libraries that are loaded from a cold disk hold its lock
)
_MOST_DOUBLINGS = 4
_FORGETS = 600.0  # seconds after which the limit of a kind of child is the usual one again


@dataclass(slots=True)
class Watchdog:
    """Measures silence in the supervisor's own running time.

    A delayed `look` means that the machine slept or was overloaded, which held up the children, too: that
    time does not count. After a child was killed for its silence its successor has twice the limit, up to
    sixteen times, as the work may really take that long.
    """

    seconds: float  # of silence that end a child; 0: none is ended
    clock: Callable[[], float] = time.monotonic
    _looked: float = field(init=False)
    _patience: dict[str, tuple[int, float]] = field(default_factory=dict)  # doublings, and when, by name

    def __post_init__(self) -> None:
        self._looked = self.clock()

    def look(self, children: Iterable[ChildProcess]) -> list[tuple[ChildProcess, str]]:
        """Returns children that hang, with the reason, each once."""
        now = self.clock()
        late = max(now - self._looked - 2 * LOOK_SECONDS, 0.0)
        self._looked = now
        if not self.seconds:
            return []
        found = []
        for child in children:
            child.excuse(late, now)
            if not (child.has_ended or child.is_doomed) and (why := self._hangs(child, now)):
                found.append((child, why))
        return found

    def _hangs(self, child: ChildProcess, now: float) -> str:
        stopped = child.stopped_since(now)
        if stopped is not None and now - stopped >= min(STOPPED_SECONDS, self.seconds):
            return f"it was stopped by a signal, for {now - stopped:.0f} s"
        silence = now - child.heard
        if silence < self._most(child, now):
            return ""
        if child.beats_itself:
            self._patience[child.name] = (self._doublings(child, now) + 1, now)
        return f"it gave no sign of life for {silence:.0f} s"

    def _most(self, child: ChildProcess, now: float) -> float:
        if not child.beats_itself:
            return max(START_SECONDS, self.seconds)
        return self.seconds * 2.0 ** min(self._doublings(child, now), _MOST_DOUBLINGS)

    def _doublings(self, child: ChildProcess, now: float) -> int:
        doublings, since = self._patience.get(child.name, (0, now))
        return doublings if now - since < _FORGETS else 0
