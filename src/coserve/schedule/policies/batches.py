"""Static batches of requests (the multi-LoRA report, 5.2.2): formed, then run to their end."""

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import View


class StaticBatches:
    """A batch leaves when `size` requests wait or the first of them has waited `delay` seconds.

    The next batch enters once every request of this one has its answer.
    """

    def __init__(self, size: int, delay: float) -> None:
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"a batch holds some number of requests, at least one, not {size}")
        if not delay >= 0:
            raise ConfigError(f"a batch is awaited for some seconds or none, not {delay}")
        self.size, self.delay = size, delay
        self._batch: frozenset[int] = frozenset()  # keys of the one that left last

    def next(self, view: View, most: int | None = None) -> tuple[Sequence, ...]:
        """The requests of the batch that leaves now, first come first served, at most `most`.

        While a batch is under way: its requests that have no pages yet, as a step has limited prompt rows.
        """
        if not self.is_under_way(view) and self.is_due(view, most):
            line = sorted(view.waiting, key=_arrival)
            self._batch = frozenset(sequence.key for sequence in line[: self._limit(most)])
        return self._rest(view)

    def is_under_way(self, view: View) -> bool:
        """Tells whether a request of the last batch has no answer yet."""
        return bool(view.running or self._rest(view))

    def is_due(self, view: View, most: int | None = None) -> bool:
        """Tells whether enough requests wait, or the first has waited for `delay`."""
        return bool(view.waiting) and (
            len(view.waiting) >= self._limit(most) or view.now >= self.due_at(view)
        )

    def due_at(self, view: View) -> float:
        """Time at which the first waiting request has waited for `delay`."""
        return min(sequence.request.arrival for sequence in view.waiting) + self.delay

    def _rest(self, view: View) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in view.waiting if sequence.key in self._batch)

    def _limit(self, most: int | None) -> int:
        return self.size if most is None else min(self.size, most)


def _arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival, sequence.key
