"""Deferred continuous batching with heterogeneous batches (FineInfer, section 3.3, algorithm 2)."""

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import NO_TRAINING, Allowance, View, register
from coserve.schedule.policies.whole import WholeBatches


@register("heterogeneous")
class Heterogeneous(WholeBatches):
    """For a base larger than memory: a mini-batch's way forward shares its pass over the weights with an
    iteration of all requests.

    Requests enter at once (lines 6 to 10). In each iteration the flag F allows training unless it would bring
    a request's deferred time to its bound (lines 11 to 15): d_r + t_f - t_i >= d_rb, where d_r is the time
    that the request waited before its first iteration and t_f - t_i for each iteration of training since,
    t_f the predicted seconds of a training iteration and t_i those of the inference iteration. With F the
    first mini-batch passes forward beside the requests' rows, and back and through its optimizer step before
    the next iteration (lines 17 to 25). `bound` is the default bound, seconds.
    """

    def __init__(self, bound: float = 0.5) -> None:
        super().__init__()
        if not bound >= 0:
            raise ConfigError(f"policy heterogeneous needs a bound of some seconds or none, not {bound}")
        self._default = bound
        self._deferred: dict[int, float] = {}  # d_r, by key of the request

    def begins(self, view: View) -> bool:
        """Tells whether B_i is empty, which leaves F true (lines 11 and 12)."""
        return view.is_idle

    def allow(self, view: View) -> Allowance:
        """The first mini-batch, beside the iteration of B_i where F is true."""
        if self._slice is None and view.running and self._may_train(view):
            self._slice = view.jobs[0].name, view.jobs[0].steps
        return super().allow(view) if self._slice is not None else NO_TRAINING

    def _may_train(self, view: View) -> bool:
        """Lines 11 to 15, and what they add to each request's d_r where F is true (lines 24 and 25)."""
        begun = (*view.running, *view.preempted)
        deferred = {s.key: self._deferred.get(s.key, _waited(s)) for s in begun}
        longer = (
            view.cost.predict_iteration(view.jobs[0].base, view.jobs[0].micro_batches)
            - view.inference_seconds
        )
        flag = all(deferred[s.key] + longer < self._bound(s) for s in view.running)
        self._deferred = {key: seconds + longer * flag for key, seconds in deferred.items()}
        return flag

    def _bound(self, sequence: Sequence) -> float:
        """Deferral bound of a request, seconds."""
        stated = sequence.request.slo.deferral
        return self._default if stated is None else stated


def _waited(sequence: Sequence) -> float:
    """Seconds from a request's arrival to its first iteration."""
    assert sequence.admitted_at is not None, "who runs has entered"
    return sequence.admitted_at - sequence.request.arrival
