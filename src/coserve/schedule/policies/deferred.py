"""Deferred continuous batching (FineInfer, section 3.2, algorithm 1)."""

from collections.abc import Collection

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("deferred")
class Deferred(WholeBatches):
    """Requests are pushed out until they are near their deferral bounds, and training has the time.

    In inference mode those enter whose deferred time and one more fine-tuning iteration reach their bound
    (line 14); they are batched continuously, and the mode ends when the last of them is answered (lines 25
    and 26). Then one iteration is trained (line 31), and only after it requests are looked at again. `bound`
    is for those who state none, seconds. Where there is nothing to train nobody is deferred.

    To the letter that shifts every request by its bound and batches only those who came within one iteration.
    The text means more ("will batch new and ongoing requests"): with `together` the first who is near its
    bound takes everybody who waits along.
    """

    def __init__(self, bound: float = 0.5, together: bool = False) -> None:
        super().__init__()
        self._together = bool(together)
        if not bound >= 0:
            raise ConfigError(f"policy deferred needs a bound of some seconds or none, not {bound}")
        self._default = bound
        self._serves = False  # whether the newest step was one of inference mode, lines 7 to 26

    def begins(self, view: View) -> bool:
        """Trains one iteration when a batch has its answers (lines 25 and 26), or no request is near a
        bound."""
        if view.running or view.preempted:
            return False
        served, self._serves = self._serves, False
        return served or not self._near(view)

    def admit(self, view: View) -> Collection[Sequence]:
        """Line 14: requests that one more iteration would bring to their bound."""
        entering = self._near(view) if view.jobs else view.waiting
        self._serves = bool(view.running or entering)
        return entering

    def _near(self, view: View) -> Collection[Sequence]:
        iteration = view.cost.predict_iteration(view.jobs[0].micro_batches)
        near = [
            s
            for s in view.waiting
            if s.admitted_at is not None or view.now - s.request.arrival + iteration >= self.bound(s)
        ]
        return view.waiting if near and self._together else near

    def bound(self, sequence: Sequence) -> float:
        """Seconds that a request may be deferred."""
        stated = sequence.request.slo.deferral
        return self._default if stated is None else stated


@register("continuous")
class Continuous(Deferred):
    """Continuous batching, and a fine-tuning iteration when nobody is there: no request is ever deferred."""

    def __init__(self) -> None:
        super().__init__(bound=0.0)

    def bound(self, sequence: Sequence) -> float:
        return 0.0
