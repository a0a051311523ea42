"""FineInfer's first naive end (section 2): fine-tuning is for when nobody is there."""

from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.whole import WholeBatches


@register("idle-only")
class IdleOnly(WholeBatches):
    """A mini-batch begins only while no request is there; who arrives meanwhile waits for its end."""

    def begins(self, view: View) -> bool:
        """When nobody waits and nobody runs."""
        return view.is_idle
