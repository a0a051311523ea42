"""Calls that wait for a base executor, in one queue for each group and direction.

Calls that wait at the same linears are computed together, their rows one after another without padding.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from torch import Tensor

from coserve.errors import CoserveError
from coserve.split.messages import LinearCall

Batching = Literal["none", "waiting"]
Outcome = Sequence[Tensor] | CoserveError
AGE_SECONDS: Final = 0.5  # after which a training call no longer waits behind inference


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A call with its tensors, each [rows, width]; `reply` takes its outcome and does not block."""

    call: LinearCall
    tensors: Sequence[Tensor]
    reply: Callable[[Outcome], None]
    came: float = field(default_factory=time.monotonic)

    @property
    def queue(self) -> tuple[str, ...]:
        """Names its queue: calls of the same class for the same products."""
        return self.call.work, self.call.direction, self.call.dtype, *self.call.paths


class CallQueues:
    """Hands out work: inference first, then the oldest. Bounded by what connections may have under way."""

    def __init__(self, batching: Batching, most_rows: int) -> None:
        """With "none" each call is computed alone, with "waiting" up to `most_rows` rows of calls that wait
        at the same linears are computed together."""
        self._batching, self._most_rows = batching, most_rows
        self._queues: dict[tuple[str, ...], deque[Work]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, work: Work) -> None:
        """Adds a call."""
        with self._changed:
            self._queues.setdefault(work.queue, deque()).append(work)
            self._changed.notify()

    def take(self) -> list[Work]:
        """Waits for calls to compute together; none once the queues are closed."""
        with self._changed:
            while not self._queues and not self._is_closed:
                self._changed.wait()
            return [] if self._is_closed else self._next(time.monotonic())

    def close(self) -> None:
        """Has `take` return nothing from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self, now: float) -> list[Work]:
        def order(queue: deque[Work]) -> tuple[bool, float]:
            first = queue[0]
            return first.call.work == "training" and now - first.came < AGE_SECONDS, first.came

        queue = min(self._queues.values(), key=order)
        taken = [queue.popleft()]
        rows = taken[0].call.rows
        while self._batching != "none" and queue and rows + queue[0].call.rows <= self._most_rows:
            taken.append(queue.popleft())
            rows += taken[-1].call.rows
        if not queue:
            del self._queues[taken[0].queue]
        return taken
