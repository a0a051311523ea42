"""Policies for the order of products, and for the calls that one product has (Symbiosis, 3.7 and 4.5).

A policy decides from the calls that wait, the accounts of clients and the time alone. Rows of different calls
are flattened one after another, without padding, and calls computed together at one layer need not be at the
next.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from coserve.errors import ConfigError
from coserve.split.clients import ACTIVE_SECONDS, ClientAccount, Expected
from coserve.split.work import ProductQueue, Work

Batching = Literal["opportunistic", "waiting", "lockstep", "none"]
NEVER: Final = float("inf")
MOST_AT_ONCE: Final = 64  # calls of one product
# Bytes of tensors, both ways, of the calls of one product: two pieces (`remote_group.PIECE`). Larger calls
# gain nothing from others, and a head's product of all training clients would be a copy of all their logits.
MOST_JOINED: Final = 16 << 20
_SHARED: Final = 0.1  # of a product's seconds, that calls of keys beyond their share may add


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The provider's settings.

    With "opportunistic" a call waits for others at most `wait_factor` times the seconds that its own product
    takes to read its weights, and all calls of one pass through the model at most `wait_cap` seconds.
    "waiting" is the same with a factor of 0: only calls that wait anyway are computed together. With
    "lockstep" active clients wait for each other at each product. With "none" each call is computed alone.

    `client_rows` are the rows that a client may have waiting; more are not read. `products` is the number of
    products computed at once, each with its part of the threads, or with all of them while it is alone; 0 is
    two where there are threads for that. Raises ConfigError.
    """

    mode: Batching = "opportunistic"
    wait_factor: float = 1.0
    wait_cap: float = 0.05
    client_rows: int = 16384
    products: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Batching):
            raise ConfigError(f"batching {self.mode!r} is none of {', '.join(get_args(Batching))}")
        for name, value in (("factor", self.wait_factor), ("cap", self.wait_cap)):
            if not 0 <= value < NEVER:
                raise ConfigError(f"the wait {name} is {value}: it must be 0 or more, and finite")
        if self.client_rows < 1:
            raise ConfigError(f"a client may have {self.client_rows} rows waiting: at least 1 is needed")
        if not 0 <= self.products <= MOST_AT_ONCE:
            raise ConfigError(f"{self.products} products at once: up to {MOST_AT_ONCE} are possible")

    def policy(self, most_rows: int) -> "BatchingPolicy":
        """The policy of this mode, with at most `most_rows` rows in a product."""
        match self.mode:
            case "opportunistic":
                return Opportunistic(most_rows, self.wait_factor, self.wait_cap)
            case "waiting":
                return Opportunistic(most_rows, 0.0, self.wait_cap)
            case "lockstep":
                return Lockstep(most_rows)
            case "none":
                return Alone(most_rows)


class BatchingPolicy(ABC):
    """Chooses the calls that are computed next."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows

    @abstractmethod
    def choose(
        self, queues: Collection[ProductQueue], clients: Collection[ClientAccount], now: float
    ) -> ProductQueue | float:
        """The queue to compute next, of one or more queues that are not empty. Else the time at which to ask
        again, if no call comes before."""

    @abstractmethod
    def together(self, queue: ProductQueue, now: float) -> list[Work]:
        """Calls of this queue to compute as one product, at least one."""

    def _first(self, works: Sequence[Work]) -> list[Work]:
        """The first of these calls, as many as a product may have rows for."""
        taken, rows, nbytes = [works[0]], works[0].call.load, works[0].nbytes
        for work in works[1:]:
            rows, nbytes = rows + work.call.load, nbytes + work.nbytes
            if rows > self._most_rows or nbytes > MOST_JOINED:
                break
            taken.append(work)
        return taken

    def _is_full(self, queue: ProductQueue) -> bool:
        """Tells whether further calls could not join these."""
        return queue.rows >= self._most_rows or queue.nbytes >= MOST_JOINED


class Alone(BatchingPolicy):
    """Each call is a product of its own."""

    def choose(
        self, queues: Collection[ProductQueue], clients: Collection[ClientAccount], now: float
    ) -> ProductQueue | float:
        return _most_urgent(queues, now)

    def together(self, queue: ProductQueue, now: float) -> list[Work]:
        return _ordered(queue, now)[:1]


class Opportunistic(BatchingPolicy):
    """A call waits for others a part of the seconds of its own product that they would spare it: those for
    reading weights. So small ones pass quickly, and calls of many rows, which gain nothing, at once: four
    training clients of two cores lost 2 % of their rate by waiting for each other.

    A call waits only for a client whose next call is expected at the same product in time, and only until a
    product is full. While the most urgent calls are held, others that are ready go first, if their product
    ends before the held ones have waited long enough; otherwise the held ones are computed. So a call waits
    no longer than allowed, and the executor is never idle while a call is ready.
    """

    def __init__(self, most_rows: int, wait_factor: float, wait_cap: float) -> None:
        super().__init__(most_rows)
        self._factor, self._cap = wait_factor, wait_cap

    def choose(
        self, queues: Collection[ProductQueue], clients: Collection[ClientAccount], now: float
    ) -> ProductQueue | float:
        expected = [call for client in clients if (call := client.expected(now))] if self._factor else []
        if not expected:
            return _most_urgent(queues, now)
        held: ProductQueue | None = None
        until = NEVER
        for queue in sorted(queues, key=lambda queue: queue.urgency(now)):
            waits_until = self._waits_until(queue, expected, now)
            if waits_until <= now:
                rows = sum(work.call.rows for work in self.together(queue, now))
                return queue if held is None or now + queue.cost.seconds(rows) <= until else held
            held, until = held or queue, min(until, waits_until)
            for work in queue.works:
                work.held = work.held or (now, now + self._allowance(work, queue))
        return until

    def together(self, queue: ProductQueue, now: float) -> list[Work]:
        """Training joins inference as far as its rows add no more time than inference may wait. Where keys
        compete, calls of those beyond their share add at most a tenth to a product, also to one of their own,
        as it delays the others."""
        taken = self._first(_ordered(queue, now))
        is_urgent, level = taken[0].is_urgent(now), taken[0].client.share.level
        hosts = [w for w in taken if w.is_urgent(now) == is_urgent and w.client.share.level == level]
        rows = sum(work.call.rows for work in (hosts[:1] if level else hosts))
        seconds = queue.cost.seconds(rows)
        left, shared = self._factor * seconds, _SHARED * seconds
        for number, work in enumerate(taken[1:], 1):
            added = work.call.rows * queue.cost.per_row
            if work.is_urgent(now) != is_urgent:
                left -= added
            if work.client.share.level:
                shared -= added
            is_guest = work.is_urgent(now) != is_urgent or bool(work.client.share.level)
            if is_guest and min(left, shared) <= 0:  # also before any measurement
                return taken[:number]
        return taken

    def _waits_until(self, queue: ProductQueue, expected: Sequence[Expected], now: float) -> float:
        if self._is_full(queue):
            return now
        until = min(work.held[1] if work.held else now + self._allowance(work, queue) for work in queue.works)
        product = queue.product
        coming = [call.until for call in expected if call.product == product and call.at <= until]
        return min(until, max(coming)) if coming else now

    def _allowance(self, work: Work, queue: ProductQueue) -> float:
        """Seconds that a call may wait for others."""
        left = max(self._cap - work.own_pass.waited, 0.0)
        return min(self._factor * queue.cost.shared(work.call.rows), left)


class Lockstep(BatchingPolicy):
    """All active clients in a forward pass wait for each other at each product, and so do those in a backward
    pass: the baseline of Symbiosis' table 5.

    Where all of them wait at different products, the one that has come least far goes on, until it meets the
    others. No call waits longer than `ACTIVE_SECONDS`.
    """

    def choose(
        self, queues: Collection[ProductQueue], clients: Collection[ClientAccount], now: float
    ) -> ProductQueue | float:
        active = [client for client in clients if client.newest is not None and client.is_active(now)]
        until = {queue: self._waits_until(queue, queues, active, now) for queue in queues}
        ready = [queue for queue in queues if until[queue] <= now]
        return _most_urgent(ready, now) if ready else min(until.values())

    def together(self, queue: ProductQueue, now: float) -> list[Work]:
        return self._first(_ordered(queue, now))

    def _waits_until(
        self,
        queue: ProductQueue,
        queues: Collection[ProductQueue],
        active: Sequence[ClientAccount],
        now: float,
    ) -> float:
        present = {work.client for work in queue.works}
        absent = [
            client
            for client in active
            if client not in present and client.newest is not None and client.newest[1] == queue.direction
        ]
        if not absent or self._is_full(queue):
            return now
        longest = min(work.came for work in queue.works) + ACTIVE_SECONDS
        elsewhere = [client.heard + ACTIVE_SECONDS for client in absent if client.may_call(now)]
        if elsewhere:
            return min(longest, *elsewhere)
        least = min(
            (other for other in queues if other.direction == queue.direction),
            key=lambda other: min(work.progress for work in other.works),
        )
        return now if least is queue else longest


def _ordered(queue: ProductQueue, now: float) -> list[Work]:
    return sorted(queue.works, key=lambda work: work.urgency(now))


def _most_urgent(queues: Collection[ProductQueue], now: float) -> ProductQueue:
    return min(queues, key=lambda queue: queue.urgency(now))
