"""FineInfer's second naive end (section 2): all requests wait until fine-tuning is over."""

from collections.abc import Iterable

from coserve.core.sequence import Sequence
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("postpone-all")
class PostponeAll(WholeBatches):
    """No request enters while there is a job. Requests that run when a job arrives are answered first."""

    def begins(self, view: View) -> bool:
        """Tells whether all running requests have their answers."""
        return not view.running and not view.preempted

    def admit(self, view: View) -> Iterable[Sequence]:
        """All waiting requests; none while there is a job."""
        return view.preempted if view.jobs else view.waiting
