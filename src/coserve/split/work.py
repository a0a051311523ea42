"""Calls that wait for a product, and the order among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from coserve.errors import CoserveError
from coserve.split.clients import ClientAccount, Pass, ProductName, product_of
from coserve.split.costs import ProductCost
from coserve.split.messages import Direction, LinearCall

Outcome = Sequence[Tensor] | CoserveError
Urgency = tuple[bool, int, bool, float, float]  # smaller is more urgent
AGE_SECONDS: Final = 0.5  # seconds after which a call without a deadline is due, and training is as inference


@dataclass(slots=True, eq=False)
class Work:
    """A call with its tensors, each [rows, width]; `reply` takes its outcome and does not block."""

    call: LinearCall
    tensors: Sequence[Tensor]
    reply: Callable[[Outcome], None]
    client: ClientAccount
    came: float = 0.0  # by the executor's clock
    held: tuple[float, float] | None = None  # waits for others since then, and until then at most
    own_pass: Pass = field(default_factory=Pass)
    progress: int = 0  # groups of linears that its pass has come to
    nbytes: int = 0  # of its tensors, both ways

    @property
    def product(self) -> ProductName:
        """The name of its product."""
        return product_of(self.call)

    def is_urgent(self, now: float) -> bool:
        """Tells whether it is treated as inference: training is after `AGE_SECONDS`."""
        return self.call.work == "inference" or now - self.came >= AGE_SECONDS

    def is_late(self, now: float) -> bool:
        """Tells whether its deadline has passed."""
        return self.call.deadline is not None and now - self.came > self.call.deadline

    def urgency(self, now: float) -> Urgency:
        """Sort key of calls: inference before training; within a class those of keys within their share
        (`KeyShare.level`); of these by deadline, and without one by progress.

        Calls that have come least far go first until they meet others, and go on with them; in order of
        arrival they would stay apart. A call without a deadline is due after `AGE_SECONDS`.
        """
        is_due = self.call.deadline is not None or now - self.came >= AGE_SECONDS
        deadline = AGE_SECONDS if self.call.deadline is None else self.call.deadline
        due = self.came + deadline
        order = due if is_due else float(self.progress)
        return not self.is_urgent(now), self.client.share.level, not is_due, order, self.came


@dataclass(slots=True, eq=False)
class ProductQueue:
    """Calls that wait for one product, in the order of arrival, and the cost of that product."""

    cost: ProductCost
    works: list[Work] = field(default_factory=list)

    @property
    def direction(self) -> Direction:
        """The direction of its calls."""
        return self.works[0].call.direction

    @property
    def product(self) -> ProductName:
        """The product of its calls."""
        return self.works[0].product

    @property
    def rows(self) -> int:
        """Rows of all calls; in decoder layers those of all their products."""
        return sum(work.call.load for work in self.works)

    @property
    def nbytes(self) -> int:
        """Bytes of all calls' tensors, both ways."""
        return sum(work.nbytes for work in self.works)

    def urgency(self, now: float) -> Urgency:
        """The urgency of its most urgent call."""
        return min(work.urgency(now) for work in self.works)
