"""Links as their messages show them: the seconds from the sending of a message until its receiver says that
it came. Dispatch reads what is measured in place of what is guessed (BlockLLM, 5.3 and 6)."""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coserve.cluster.records import ClusterLink

_SAMPLES: Final = 8  # messages that count: a link that has changed shows it soon
_UNDER_WAY: Final = 1024  # messages whose receivers have not answered
_HALF_LIFE: Final = 10.0  # seconds without a message
_FADED: Final = 1e-9
_SHORTEST: Final = 1e-9  # seconds of a message
_FASTEST: Final = 1e-15  # seconds of a byte


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link as it was at the time `at`."""

    link: ClusterLink
    at: float

    def faded(self, guess: ClusterLink, now: float) -> ClusterLink:
        """The link as it is expected to be now: what was measured counts half as much after every half-life,
        down to the `guess`. Rows avoid a slow link, so it would never be measured again otherwise."""
        share = max(0.5 ** (max(now - self.at, 0.0) / _HALF_LIFE), _FADED)
        rate, latency = self.link.rate, self.link.latency
        if rate < guess.rate:
            rate = min(rate / share, guess.rate)
        return ClusterLink(rate, min(latency, max(latency * share, guess.latency)))


class LinkTimer:
    """Measures one direction of a link. Messages have numbers; any thread may call."""

    def __init__(self) -> None:
        self.measured: MeasuredLink | None = None  # None before any message
        self._lock = threading.Lock()  # of all below
        self._under_way: deque[tuple[int, float, float]] = deque(maxlen=_UNDER_WAY)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._free_at = float("-inf")

    def sent(self, number: int, nbytes: float, now: float) -> None:
        """A message is being sent. One without a tensor tells nothing."""
        if nbytes:
            with self._lock:
                self._under_way.append((number, nbytes, now))

    def came(self, number: int, now: float) -> None:
        """The receiver has said that a message came. Its bytes began when it was sent, or once those before
        had come; bytes of earlier messages of which it said nothing came with it."""
        with self._lock:
            if all(one[0] != number for one in self._under_way):
                return
            nbytes, sent_at = 0.0, now
            while True:
                earlier, more, at = self._under_way.popleft()
                nbytes, sent_at = nbytes + more, min(sent_at, at)
                if earlier == number:
                    break
            seconds = now - max(sent_at, self._free_at)
            self._free_at = now
            self._samples.append((nbytes, max(seconds, _SHORTEST)))
            self.measured = MeasuredLink(fitted(self._samples), now)

    def forget(self) -> None:
        """The connection has ended: what was under way may never come."""
        with self._lock:
            self._under_way.clear()


def fitted(samples: Iterable[tuple[float, float]]) -> ClusterLink:
    """The link that (bytes, seconds) of messages show. Other work of either end only adds seconds, so the
    quickest message counts, and of those of more than twice its bytes the one with the least time for each
    further byte. Without any the whole time is that of bytes."""
    found = list(samples)
    nbytes, seconds = min(found, key=lambda one: one[1])
    slopes = [(longer - seconds) / (more - nbytes) for more, longer in found if more > 2 * nbytes]
    slope = max(min([seconds / nbytes, *slopes]), _FASTEST)
    return ClusterLink(1.0 / slope, max(seconds - slope * nbytes, 0.0))
