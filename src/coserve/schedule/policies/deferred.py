"""Deferred continuous batching (FineInfer, section 3.2, algorithm 1)."""

from collections.abc import Collection

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("deferred")
class Deferred(WholeBatches):
    """Defers requests until they are near their deferral bounds; training has the time until then.

    In inference mode requests enter whose deferred time plus one fine-tuning iteration reaches their bound
    (line 14); they are batched continuously, and the mode ends when the last of them is answered (lines 25
    and 26). Then one iteration is trained (line 31) before requests are checked again. `bound` is the default
    bound, seconds. Without jobs no request is deferred.

    Taken literally that delays every request by its bound and batches only those that arrived within one
    iteration. The text suggests more ("will batch new and ongoing requests"): with `together` all waiting
    requests enter when the first is near its bound.
    """

    def __init__(self, bound: float = 0.5, together: bool = False) -> None:
        super().__init__()
        self._together = bool(together)
        if not bound >= 0:
            raise ConfigError(f"policy deferred needs a bound of some seconds or none, not {bound}")
        self._default = bound
        self._serves = False  # whether the newest step was one of inference mode, lines 7 to 26

    def begins(self, view: View) -> bool:
        """Tells whether to train: the batch is answered (lines 25 and 26), or no request is near its
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
        iteration = view.cost.predict_iteration(view.jobs[0].base, view.jobs[0].micro_batches)
        near = [
            s
            for s in view.waiting
            if s.admitted_at is not None or view.now - s.request.arrival + iteration >= self.bound(s)
        ]
        return view.waiting if near and self._together else near

    def bound(self, sequence: Sequence) -> float:
        """Deferral bound of a request, seconds."""
        stated = sequence.request.slo.deferral
        return self._default if stated is None else stated


@register("continuous")
class Continuous(Deferred):
    """Continuous batching, with a fine-tuning iteration when there are no requests: none is ever deferred."""

    def __init__(self) -> None:
        super().__init__(bound=0.0)

    def bound(self, sequence: Sequence) -> float:
        return 0.0
