"""The seconds of products that each key of an executor's clients has had recently.

A key competes where calls of several keys wait, or are expected as after the same products before. A key with
several calls goes behind those of others once it has had more than each of the others. So a client with ten
connections of one key gets no more than one with a single connection. A key with one call at a time is never
delayed, as it has no advantage; small and large clients with a key each go on meeting. The seconds fade: use
of the idle executor delays a key for about a second. Calls of a single key are not affected.
"""

from collections.abc import Mapping
from math import exp
from typing import Final

FADE_SECONDS: Final = 1.0  # seconds in which the past of a key fades to 1/e
# Seconds of products that make a difference between keys. Below it the order is that of calls' progress, in
# which they meet and become one product.
SLACK_SECONDS: Final = 0.1
_FORGOTTEN: Final = 0.01 * SLACK_SECONDS  # seconds below which a key without connections is dropped


class KeyShare:
    """Seconds that one key has had, fading. `level` is their excess over those of each other key that
    competes, in units of `SLACK_SECONDS`; 0 for a key with one call at a time."""

    __slots__ = ("_at", "_had", "connections", "level")

    def __init__(self) -> None:
        self.connections = self.level = 0
        self._had = self._at = 0.0

    def had(self, now: float) -> float:
        """Its seconds as faded at `now`."""
        return self._had * exp(-max(now - self._at, 0.0) / FADE_SECONDS)

    def add(self, seconds: float, now: float) -> None:
        """Counts seconds of products that end at `now`."""
        self._had, self._at = self.had(now) + seconds, now


class KeyShares:
    """The shares of all keys that have connections, or had some lately: a new connection changes nothing."""

    def __init__(self) -> None:
        self._of: dict[str, KeyShare] = {}

    def join(self, key: str, now: float) -> KeyShare:
        """The share of a key, for one more connection."""
        gone = [name for name, own in self._of.items() if not own.connections and own.had(now) < _FORGOTTEN]
        for name in gone:
            del self._of[name]
        share = self._of.setdefault(key, KeyShare())
        share.connections += 1
        return share

    def leave(self, share: KeyShare) -> None:
        """Notes that one of its connections has ended."""
        share.connections -= 1

    @property
    def are_several(self) -> bool:
        """Tells whether levels can differ."""
        return len(self._of) > 1


def compare(competing: Mapping[KeyShare, int], now: float) -> None:
    """Sets the levels of keys, given how many calls of each wait or are expected."""
    had = {share: share.had(now) for share in competing}
    for share, calls in competing.items():
        others = max((seconds for other, seconds in had.items() if other is not share), default=None)
        is_held = calls > 1 and others is not None
        share.level = max(0, int((had[share] - (others or 0.0)) / SLACK_SECONDS)) if is_held else 0
