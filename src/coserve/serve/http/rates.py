"""Rate limits: token buckets, in memory."""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Final

_MINUTE: Final = 60.0  # seconds
_ROUNDING: Final = 1e-6  # seconds that many pauses may be off
_MOST_ENTRIES: Final = 10_000  # of one `TokenBuckets`: some 2 MB


class TokenBuckets:
    """One token bucket for each name: it holds `most` tokens, refilled in a minute. `most` 0 is unlimited.

    A bucket is stored as the time at which it will be full, so full buckets take no memory. Beyond `entries`
    the least recently used buckets are dropped, and count as full. For one event loop.
    """

    def __init__(
        self, most: int, clock: Callable[[], float] = monotonic, entries: int = _MOST_ENTRIES
    ) -> None:
        self.limit(most)
        self._clock, self._entries = clock, entries
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def limit(self, most: int) -> None:
        """Changes the number of tokens of each bucket. What is in them is counted by the new pause."""
        self.most = most
        self._pause = _MINUTE / most if most else 0.0  # seconds between two tokens

    def __len__(self) -> int:
        return len(self._full_at)

    def wait(self, name: str) -> float:
        """Seconds until there is a token; 0 if there is one."""
        ahead = max(self._full_at.get(name, 0.0) - self._clock(), 0.0) + self._pause
        return ahead - _MINUTE if ahead - _MINUTE > _ROUNDING else 0.0

    def take(self, name: str) -> float:
        """As `wait`; takes a token if there is one."""
        wait = self.wait(name)
        if self._pause and not wait:
            now = self._clock()
            self._full_at[name] = max(self._full_at.get(name, now), now) + self._pause
            self._full_at.move_to_end(name)
            while len(self._full_at) > self._entries:
                self._full_at.popitem(last=False)
        return wait
