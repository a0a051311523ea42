"""FineInfer's first naive end (section 2): fine-tuning runs only without requests."""

from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("idle-only")
class IdleOnly(WholeBatches):
    """A mini-batch begins only while there are no requests; later arrivals wait for its end."""

    def begins(self, view: View) -> bool:
        """Tells whether no request waits or runs."""
        return view.is_idle
