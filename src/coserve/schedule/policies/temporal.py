"""Temporal sharing (FlexLLM, section 3 and 8; "temporal sharing" of the multi-LoRA report, 4.4.1).

The machine changes hands between inference and training: after every `n` finished requests, and whenever
no request is there, one whole micro-batch goes forward and back, alone. Requests wait until it is done.
"""

from collections.abc import Iterable

from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.policies.base import INFINITE, NO_TRAINING, Allowance, View, register


@register("temporal")
class Temporal:
    """`n` finished requests buy one micro-batch; smaller trains more and makes requests wait longer."""

    def __init__(self, n: int = 8) -> None:
        if n < 1:
            raise ConfigError(f"policy temporal needs n >= 1 requests between micro-batches, not {n}")
        self._n = n
        self._last = 0  # how many had finished when the last slice of training ended
        self._slice: int | None = None  # the micro-batch that has the machine

    def holds(self, view: View) -> bool:
        """While a micro-batch has the machine, and while an optimizer step that it led to is due."""
        if self._slice is not None and self._slice not in {batch.key for batch in view.training}:
            self._slice, self._last = None, view.finished
        if self._slice is None and view.training and self._is_due(view):
            self._slice = view.training[0].key
        return self._slice is not None or bool(view.updates)

    def admit(self, view: View) -> Iterable[Sequence]:
        """Everybody."""
        return view.waiting

    def allow(self, view: View) -> Allowance:
        """The whole of the micro-batch that has the machine, or an optimizer step, or nothing."""
        if self._slice is None and not view.updates:
            return NO_TRAINING
        only = frozenset[int]() if self._slice is None else frozenset({self._slice})
        return Allowance(INFINITE, rows=None, only=only)

    def _is_due(self, view: View) -> bool:
        idle = not view.waiting and not view.running
        return idle or view.finished - self._last >= self._n
