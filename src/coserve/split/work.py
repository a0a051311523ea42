"""Calls that wait for a product, and the order among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from coserve.errors import CoserveError
from coserve.split.clients import ClientAccount, Pass
from coserve.split.costs import ProductCost
from coserve.split.messages import Direction, LinearCall

Outcome = Sequence[Tensor] | CoserveError
AGE_SECONDS: Final = 0.5  # in which a call without a deadline is due; training waits behind inference so long
ProductName = tuple[str, ...]  # the direction and the paths


@dataclass(slots=True, eq=False)
class Work:
    """A call with its tensors, each [rows, width]; `reply` takes its outcome and does not block."""

    call: LinearCall
    tensors: Sequence[Tensor]
    reply: Callable[[Outcome], None]
    client: ClientAccount
    came: float = 0.0  # by the executor's clock, as `held`: since when it could be computed, and waits
    held: float | None = None
    own_pass: Pass = field(default_factory=Pass)
    progress: int = 0  # products of its pass up to this one

    @property
    def product(self) -> ProductName:
        """Names what it asks for: calls with the same name can be computed together."""
        return self.call.direction, self.call.dtype, *self.call.paths

    def is_urgent(self, now: float) -> bool:
        """Tells whether it goes with inference: training does after `AGE_SECONDS`."""
        return self.call.work == "inference" or now - self.came >= AGE_SECONDS

    def is_late(self, now: float) -> bool:
        """Tells whether its deadline has passed."""
        return self.call.deadline is not None and now - self.came > self.call.deadline

    def urgency(self, now: float) -> tuple[bool, float]:
        """Sorts calls: inference ahead of training, then by deadline. As a call without one is due in
        `AGE_SECONDS`, new calls with deadlines do not hold it up for ever."""
        deadline = AGE_SECONDS if self.call.deadline is None else self.call.deadline
        return not self.is_urgent(now), self.came + deadline


@dataclass(slots=True, eq=False)
class ProductQueue:
    """Calls that wait for one product, in the order of arrival, and what that product costs."""

    cost: ProductCost
    works: list[Work] = field(default_factory=list)

    @property
    def direction(self) -> Direction:
        """Of its calls."""
        return self.works[0].call.direction

    @property
    def rows(self) -> int:
        """Rows of all calls."""
        return sum(work.call.rows for work in self.works)

    def urgency(self, now: float) -> tuple[bool, float]:
        """Of its most urgent call."""
        return min(work.urgency(now) for work in self.works)
