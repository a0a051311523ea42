"""FineInfer's second naive end (section 2): all requests wait until fine-tuning is over."""

from collections.abc import Iterable

from coserve.core.sequence import Sequence
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("postpone-all")
class PostponeAll(WholeBatches):
    """Nobody enters while there is a job. Who ran when it came is answered first."""

    def begins(self, view: View) -> bool:
        """As soon as those who run have their answers."""
        return not view.running and not view.preempted

    def admit(self, view: View) -> Iterable[Sequence]:
        """Nobody new, while there is a job."""
        return view.preempted if view.jobs else view.waiting
