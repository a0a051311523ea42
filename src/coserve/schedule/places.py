"""Places for answers under way, and the length of steps that leaves places for new requests."""

from math import exp
from typing import Final

_SPAN: Final = 10.0  # seconds of arrivals and answers that count; older ones fade
TAKEN: Final = 0.75  # of the places: more requests than usual find one, too


class Places:
    """Recent arrivals, and lengths of recent answers.

    Training makes answers take longer, so that more of them are under way at once. Where these take all
    places (sequences that may run at once, or the pages for them), a new request waits for one, and no bound
    of the running ones shows that.
    """

    def __init__(self) -> None:
        self._arrived = self._pressing = self._elapsed = self._ended = self._tokens = 0.0
        self._newest: float | None = None

    def arrived(self, now: float, presses: bool = True) -> None:
        """Records an arrival; `presses` tells whether it has stopped training under way."""
        self._pass(now)
        self._arrived += 1.0
        self._pressing += presses

    def ended(self, now: float, tokens: int) -> None:
        """Records the end of an answer of so many tokens."""
        self._pass(now)
        self._ended += 1.0
        self._tokens += tokens

    def longest_step(self, now: float, places: float, tokens: float) -> float:
        """Longest mean step, in seconds, that leaves a quarter of the `places` free.

        Little's law: at r requests a second of L steps of T seconds each, r L T requests are under way. L is
        that of recent answers, or `tokens` while few have ended. Infinite without arrivals.
        """
        self._pass(now)
        # As if the present answers' `tokens` had been seen once: the first to end are the short ones.
        steps = (self._tokens + tokens) / (self._ended + 1.0)
        rate = self.rate(now)
        return TAKEN * places / (rate * steps) if rate * steps > 0 else float("inf")

    def rate(self, now: float) -> float:
        """Arrivals a second, of late."""
        self._pass(now)
        return self._arrived / max(self._elapsed, 1.0)

    def pressing_rate(self, now: float) -> float:
        """The same, of those that stop training."""
        self._pass(now)
        return self._pressing / max(self._elapsed, 1.0)

    def _pass(self, now: float) -> None:
        elapsed = 0.0 if self._newest is None else max(now - self._newest, 0.0)
        fade = exp(-elapsed / _SPAN)
        self._arrived, self._pressing = self._arrived * fade, self._pressing * fade
        self._elapsed = self._elapsed * fade + elapsed
        self._ended, self._tokens = self._ended * fade, self._tokens * fade
        self._newest = now if self._newest is None else max(now, self._newest)
