"""Calls that wait for a base executor, and the accounts of its clients and products.

Calls come from a thread for each connection and are taken by the one that computes, or computed at once by
the thread that brings them. Their number is bounded by what connections may have under way.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coserve.split.batching import NEVER, BatchingConfig
from coserve.split.clients import ClientAccount, ProductName
from coserve.split.costs import ProductCost, RecentRate
from coserve.split.key_shares import KeyShares, compare
from coserve.split.messages import (
    ClientStatus,
    Direction,
    GroupShape,
    ProductStatus,
    SpanShape,
)
from coserve.split.work import ProductQueue, Work

MOST_PRODUCTS: Final = 2000  # most products in a status: those computed most often
# A product of fewer seconds is computed by the thread that has read its call. Handing it to another took 130
# to 150 us of 450, and 0.1 ms of a span of 2.3 ms. Until it is computed the connection is not read.
_SHORT: Final = 6e-3
# Connections whose threads may do so: each such thread gets OpenMP threads of its own, one for each core but
# its own, which stay until it ends. With more clients at work than these, queues are seldom empty.
MOST_COMPUTING: Final = 4


@dataclass(slots=True)
class _Tally:
    """Products of one group in one direction so far."""

    cost: ProductCost = field(default_factory=ProductCost)
    batches: int = 0
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0


class CallQueues:
    """Hands out the calls that the policy has one product for."""

    def __init__(
        self,
        config: BatchingConfig,
        groups: Sequence[GroupShape],
        most_rows: int,
        clock: Callable[[], float] = time.monotonic,
        spans: Sequence[SpanShape] = (),
    ) -> None:
        """At most `most_rows` rows are in a product of several calls; calls are for linears of `groups` and
        for `spans` of them."""
        self._policy = config.policy(most_rows)
        self._clock = clock
        self._groups = {path: tuple(group.outputs) for group in groups for path in group.outputs}
        # A client that calls a span has come as far as one that calls its groups.
        self._steps = {
            span.path: len({self._groups[path] for path in span.linears if path in self._groups})
            for span in spans
        }
        self._queues: dict[ProductName, ProductQueue] = {}
        self._tallies: dict[tuple[Direction, tuple[str, ...]], _Tally] = {}
        self._clients: dict[ClientAccount, None] = {}  # in order of arrival
        self._computing: set[ClientAccount] = set()  # those whose threads have computed
        self._shares = KeyShares()
        self.received, self.sent = RecentRate(), RecentRate()
        self._changed = threading.Condition()
        self._is_closed = False
        self._at_once = config.products or 1
        self._busy = 0  # products that were handed out and are not done

    def join(self, name: str, key: str = "") -> ClientAccount:
        """Makes an account for a connection; those with the same key have one share."""
        with self._changed:
            now = self._clock()
            account = ClientAccount(name, now, self._shares.join(key, now))
            self._clients[account] = None
            return account

    def leave(self, client: ClientAccount) -> None:
        """Drops a connection's account, and its calls that wait. Other calls no longer wait for it."""
        with self._changed:
            if client in self._clients:
                del self._clients[client]
                self._computing.discard(client)
                self._shares.leave(client.share)
            for product, queue in list(self._queues.items()):
                self._keep(product, [work for work in queue.works if work.client is not client])
            self._changed.notify()

    def put(self, work: Work) -> None:
        """Adds a call of a client that has joined."""
        with self._changed:
            self._add(work)
            self._changed.notify()

    def offer(self, work: Work) -> list[Work]:
        """As `put`, but returns the call where the caller is to compute it. It does if the call is the only
        one, waits for no others, takes less than `_SHORT` seconds, and its connection is one of the first
        `MOST_COMPUTING` with such calls."""
        with self._changed:
            is_only = not self._queues and not self._busy
            self._add(work)
            works: list[Work] = []
            if is_only and self._may_compute(work.client) and 0 < self._seconds(work) < _SHORT:
                works, _ = self._next(work.came)
            if works:
                self._busy += 1
                self._computing.add(work.client)
            else:
                self._changed.notify()
            return works

    def take(self) -> list[Work]:
        """Waits for calls to compute together; none once the queues are closed. At most as many products as
        the configuration has are handed out and not `done`."""
        with self._changed:
            while not self._is_closed:
                works, again = self._next(self._clock()) if self._busy < self._at_once else ([], NEVER)
                if works:
                    self._busy += 1
                    if self._queues:
                        self._changed.notify()  # wakes another thread in `take`
                    return works
                self._changed.wait(None if again == NEVER else max(again - self._clock(), 0.0))
            return []

    def is_last(self) -> bool:
        """Tells whether one product is handed out, and no call waits."""
        with self._changed:
            return self._busy == 1 and not self._queues

    def done(self) -> None:
        """Notes that calls from `take` or `offer` are computed."""
        with self._changed:
            self._busy -= 1
            if self._queues:
                self._changed.notify()

    def poll(self) -> tuple[list[Work], float]:
        """Calls to compute together, or none and the time at which to ask again if no call comes before."""
        with self._changed:
            return self._next(self._clock())

    def answer(self, works: Sequence[Work]) -> None:
        """Notes that calls which were taken are about to be answered."""
        with self._changed:
            now = self._clock()
            for work in works:
                work.client.answer(work.call, now)

    def count(self, works: Sequence[Work], seconds: float, nbytes: Sequence[int]) -> None:
        """Notes a product for these calls, computed in `seconds`, and the bytes that each gets."""
        with self._changed:
            now = self._clock()
            tally, rows = self._tally(works[0]), sum(work.call.rows for work in works)
            tally.cost.observe(rows, seconds)
            tally.batches += 1
            tally.calls += len(works)
            tally.rows += rows
            tally.seconds += seconds
            for work, sent in zip(works, nbytes, strict=True):
                work.client.count(work.call, sent, now)
                work.client.share.add(seconds * work.call.rows / rows, now)
                self.sent.add(sent, now)

    def close(self) -> None:
        """Has `take` return nothing from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def status(
        self, but: ClientAccount | None = None
    ) -> tuple[tuple[ProductStatus, ...], tuple[ClientStatus, ...]]:
        """The products that were computed, in the order of the base's linears and at most `MOST_PRODUCTS`;
        and all clients now except one."""
        with self._changed:
            now = self._clock()
            clients = tuple(client.status(now) for client in self._clients if client is not but)
            return self._products(), clients

    def _products(self) -> tuple[ProductStatus, ...]:
        waiting: dict[tuple[Direction, tuple[str, ...]], list[Work]] = {}
        for queue in self._queues.values():
            waiting.setdefault(self._name(queue.works[0]), []).extend(queue.works)
        order = {paths: number for number, paths in enumerate(self._groups.values())}
        often = sorted(self._tallies.items(), key=lambda item: -item[1].batches)[:MOST_PRODUCTS]
        return tuple(
            ProductStatus(
                direction,
                paths,
                tally.batches,
                tally.calls,
                tally.rows,
                tally.seconds,
                len(found := waiting.get((direction, paths), [])),
                sum(work.call.rows for work in found),
                tally.cost.fixed,
                tally.cost.per_row,
            )
            for (direction, paths), tally in sorted(
                often, key=lambda item: (item[0][0] == "backward", order.get(item[0][1], len(order)))
            )
        )

    def _add(self, work: Work) -> None:
        work.came = self._clock()
        if work.client not in self._clients:
            return
        work.own_pass = work.client.add(work.call, work.came)
        work.own_pass.progress += sum(self._steps.get(path, 0) for path in work.call.paths) or 1
        work.progress = work.own_pass.progress
        self.received.add(work.call.nbytes, work.came)
        queue = self._queues.setdefault(work.product, ProductQueue(self._tally(work).cost))
        queue.works.append(work)

    def _may_compute(self, client: ClientAccount) -> bool:
        is_room = client in self._computing or len(self._computing) < MOST_COMPUTING
        return is_room and client in self._clients

    def _seconds(self, work: Work) -> float:
        return self._tally(work).cost.seconds(work.call.rows)

    def _next(self, now: float) -> tuple[list[Work], float]:
        if not self._queues:
            return [], NEVER
        if self._shares.are_several:
            calls = Counter(work.client.share for queue in self._queues.values() for work in queue.works)
            calls.update(own.share for own in self._clients if own.expected(now))
            compare(calls, now)
        chosen = self._policy.choose(self._queues.values(), self._clients, now)
        if not isinstance(chosen, ProductQueue):
            return [], chosen
        works = self._policy.together(chosen, now)
        for work in works:
            if work.held is not None:
                since, until = work.held
                work.own_pass.waited += min(now, until) - since
                work.client.held += min(now, until) - since
        self._keep(works[0].product, [work for work in chosen.works if work not in works])
        return works, now

    def _keep(self, product: ProductName, works: list[Work]) -> None:
        """Leaves a queue with these of its calls, or without any."""
        self._queues[product].works = works
        if not works:
            del self._queues[product]

    def _tally(self, work: Work) -> _Tally:
        return self._tallies.setdefault(self._name(work), _Tally())

    def _name(self, work: Work) -> tuple[Direction, tuple[str, ...]]:
        call = work.call  # of spans, those of a call are one product
        return call.direction, self._groups.get(call.paths[0], call.paths)
