"""Enhanced temporal sharing (the multi-LoRA report, 4.4.2, algorithm 1)."""

from collections.abc import Iterable

from coserve.core.sequence import Sequence
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.batches import StaticBatches
from coserve.schedule.policies.whole import WholeBatches


@register("enhanced-temporal")
class EnhancedTemporal(WholeBatches):
    """Batches of requests have priority; between them training runs one mini-batch at a time.

    `batch` is INFERENCE_BATCH_SIZE, requests; `delay` is INFERENCE_DELAY, seconds. Their defaults are the
    report's (5.2.2).
    """

    def __init__(self, batch: int = 64, delay: float = 5.0) -> None:
        super().__init__()
        self._batches = StaticBatches(batch, delay)

    def begins(self, view: View) -> bool:
        """Tells whether no batch runs and none is due."""
        return not self._batches.is_under_way(view) and not self._batches.is_due(view)

    def admit(self, view: View) -> Iterable[Sequence]:
        """Requests of the batch that is due."""
        return self._batches.next(view)

    def wake(self, view: View) -> float:
        """Time at which a batch is due without further requests."""
        return self._batches.due_at(view)
