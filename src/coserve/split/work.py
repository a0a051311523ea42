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
AGE_SECONDS: Final = 0.5  # in which a call without a deadline is due; training waits behind inference so long


@dataclass(slots=True, eq=False)
class Work:
    """A call with its tensors, each [rows, width]; `reply` takes its outcome and does not block."""

    call: LinearCall
    tensors: Sequence[Tensor]
    reply: Callable[[Outcome], None]
    client: ClientAccount
    came: float = 0.0  # by the executor's clock
    held: tuple[float, float] | None = None  # since when it waits for company, and how long it may at most
    own_pass: Pass = field(default_factory=Pass)
    progress: int = 0  # groups of linears that its pass has come to
    nbytes: int = 0  # of its tensors, both ways

    @property
    def product(self) -> ProductName:
        """Names what it asks for."""
        return product_of(self.call)

    def is_urgent(self, now: float) -> bool:
        """Tells whether it goes with inference: training does after `AGE_SECONDS`."""
        return self.call.work == "inference" or now - self.came >= AGE_SECONDS

    def is_late(self, now: float) -> bool:
        """Tells whether its deadline has passed."""
        return self.call.deadline is not None and now - self.came > self.call.deadline

    def urgency(self, now: float) -> Urgency:
        """Sorts calls: inference ahead of training; within a class those of keys within their share
        (`KeyShare.level`); of these by deadline, and without one by progress.

        Those that have come least far go first until they meet others, and go on with them: in the order of
        arrival they would stay apart. A call without a deadline is due after `AGE_SECONDS`.
        """
        is_due = self.call.deadline is not None or now - self.came >= AGE_SECONDS
        deadline = AGE_SECONDS if self.call.deadline is None else self.call.deadline
        due = self.came + deadline
        order = due if is_due else float(self.progress)
        return not self.is_urgent(now), self.client.share.level, not is_due, order, self.came


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
    def product(self) -> ProductName:
        """Of its calls."""
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
        """Of its most urgent call."""
        return min(work.urgency(now) for work in self.works)
