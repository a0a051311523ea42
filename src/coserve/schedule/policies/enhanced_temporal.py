"""Enhanced temporal sharing (the multi-LoRA report, 4.4.2, algorithm 1)."""

from collections.abc import Iterable

from coserve.core.sequence import Sequence
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.batches import StaticBatches
from coserve.schedule.policies.whole import WholeBatches


@register("enhanced-temporal")
class EnhancedTemporal(WholeBatches):
    """Batches of requests come first; between them training runs a mini-batch at a time, and so pauses.

    `batch` is INFERENCE_BATCH_SIZE, requests; `delay` is INFERENCE_DELAY, seconds. Their defaults are the
    report's (5.2.2).
    """

    def __init__(self, batch: int = 64, delay: float = 5.0) -> None:
        super().__init__()
        self._batches = StaticBatches(batch, delay)

    def begins(self, view: View) -> bool:
        """While no batch runs, and none is due."""
        return not self._batches.is_under_way(view) and not self._batches.is_due(view)

    def admit(self, view: View) -> Iterable[Sequence]:
        """The batch that is due."""
        return self._batches.next(view)

    def wake(self, view: View) -> float:
        """When a batch is due without another request."""
        return self._batches.due_at(view)
