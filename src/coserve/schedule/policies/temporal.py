"""Temporal sharing (FlexLLM, section 3 and 8.3; the multi-LoRA report, 4.4.1): requests and jobs take
turns."""

from collections.abc import Iterable
from typing import Literal, get_args

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import View, register
from coserve.schedule.policies.batches import StaticBatches
from coserve.schedule.policies.whole import WholeBatches

Grain = Literal["request", "batch"]


@register("temporal")
class Temporal(WholeBatches):
    """One fine-tuning request after every `n` inference requests, and whenever there are none.

    With the grain `request` a fine-tuning request is a whole job, as in the report (4.4.2: "if fine-tuning
    requires four minutes, requests wait for two on average"); with `batch` one mini-batch, FlexLLM's time
    slice. With `batch` (requests) and `delay` (seconds) requests are served in the report's static batches,
    limited to the rest of the `n` while a job waits; otherwise all enter at once and pause while training has
    the machine.
    """

    def __init__(
        self, n: int = 8, grain: Grain = "request", batch: int | None = None, delay: float = 0.0
    ) -> None:
        super().__init__()
        if not isinstance(n, int) or n < 1:
            raise ConfigError(f"policy temporal needs n >= 1 requests between two of training, not {n}")
        if grain not in get_args(Grain):
            raise ConfigError(f"policy temporal has the grains {', '.join(get_args(Grain))}, not {grain!r}")
        self.whole_jobs = grain == "request"
        self._n = n
        self._batches = None if batch is None else StaticBatches(batch, delay)
        self._last = 0  # finished sequences at the end of the last training

    def begins(self, view: View) -> bool:
        """Tells whether n requests were served, or none are there; a static batch is served to its end
        first."""
        if self._batches is not None and self._batches.is_under_way(view):
            return False
        return view.is_idle or view.finished - self._last >= self._n

    def ended(self, view: View) -> None:
        self._last = view.finished

    def admit(self, view: View) -> Iterable[Sequence]:
        """All waiting requests, or the next batch."""
        if self._batches is None:
            return view.waiting
        return self._batches.next(view, self._most(view))

    def wake(self, view: View) -> float:
        """Time at which the next batch leaves."""
        return view.now if self._batches is None else self._batches.due_at(view)

    def _most(self, view: View) -> int | None:
        return self._n - (view.finished - self._last) if view.jobs else None
