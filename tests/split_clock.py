"""The executor's queues on a scripted clock, with linears that take `fixed` and `per_row` for each row.

Clients call one product after the other, each a time of their own after the last one's answer. All times here
are in milliseconds.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from coserve.split.batching import BatchingConfig
from coserve.split.clients import ClientAccount
from coserve.split.messages import Direction, GroupShape, LinearCall, WorkClass
from coserve.split.queues import CallQueues
from coserve.split.work import Outcome, Work

LAYERS = 4  # products of a pass, one way
NEVER = float("inf")


@dataclass
class Caller:
    """A client: `rows` in each call, `think` from an answer to the next call, before its first one, too.
    A training client goes all the way back after each pass. `leaves` is when its connection ends. Those with
    the same `key` have one share."""

    name: str
    rows: int = 1
    think: float | Callable[[], float] = 0.0
    passes: int = 1
    work: WorkClass = "inference"
    begins: float = 0.0
    deadline: float | None = None
    leaves: float = NEVER
    key: str = ""
    account: ClientAccount | None = None
    answers: list[tuple[float, Outcome]] = field(default_factory=list)
    ended: float = NEVER

    def products(self) -> Iterator[tuple[Direction, int]]:
        for _ in range(self.passes):
            yield from (("forward", layer) for layer in range(LAYERS))
            if self.work == "training":
                yield from (("backward", layer) for layer in reversed(range(LAYERS)))


class SplitWorld:
    """Plays clients until all have ended. `batches` are (begin, end, product, names), as are `lines`."""

    def __init__(
        self, config: BatchingConfig, fixed: float = 1.0, per_row: float = 0.01, most_rows: int = 8192
    ) -> None:
        self.now = 0.0
        groups = [GroupShape(1, {f"layers.{layer}": 1}) for layer in range(LAYERS)]
        self.queues = CallQueues(config, groups, most_rows, lambda: self.now / 1e3)
        self.fixed, self.per_row = fixed, per_row
        self.batches: list[tuple[float, float, str, list[str]]] = []
        self.idle = 0.0  # in which calls waited and nothing was computed
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._computing: list[Work] | None = None

    @property
    def lines(self) -> list[str]:
        return [
            f"{begin:g}-{end:g} {product}: {' '.join(names)}" for begin, end, product, names in self.batches
        ]

    def know(self) -> None:
        """Has the queues learn what products take, as from a client that came before."""
        account = self.queues.join("teacher")
        for direction in ("forward", "backward"):
            for layer in range(LAYERS):
                for rows in (1, 100):
                    call = LinearCall(0, (f"layers.{layer}",), direction, rows, "float32", "inference", 0)
                    work = Work(call, [], lambda outcome: None, account)
                    self.queues.count([work], (self.fixed + rows * self.per_row) / 1e3, [0])
        self.queues.leave(account)

    def play(self, *callers: Caller, until: float = NEVER) -> None:
        for caller in callers:
            self.at(caller.begins, lambda caller=caller: self._join(caller))  # type: ignore[misc]
            if caller.leaves < NEVER:
                self.at(caller.leaves, lambda caller=caller: self.queues.leave(caller.account))  # type: ignore[misc]
        while True:
            again = NEVER
            if self._computing is None:
                works, again = self.queues.poll()
                if works:
                    self._compute(works)
                    continue
                again = max(again * 1e3, self.now + 1e-9)  # what rounding makes equal would be asked for ever
            then = min(again, self._events[0][0] if self._events else NEVER)
            if then == NEVER or then > until:
                return
            if again < NEVER:
                self.idle += then - self.now
            self.now = max(then, self.now)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()

    def at(self, then: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (then, next(self._numbers), happens))

    def _join(self, caller: Caller) -> None:
        caller.account = self.queues.join(caller.name, caller.key)
        self._go_on(caller, caller.products())

    def _go_on(self, caller: Caller, left: Iterator[tuple[Direction, int]]) -> None:
        product = next(left, None)
        if product is None or caller.leaves <= self.now:
            caller.ended = min(caller.ended, self.now)
            return
        think = caller.think() if callable(caller.think) else caller.think
        self.at(self.now + think, lambda: self._call(caller, product, left))

    def _call(
        self, caller: Caller, product: tuple[Direction, int], left: Iterator[tuple[Direction, int]]
    ) -> None:
        direction, layer = product
        path, nbytes = f"layers.{layer}", 4 * caller.rows
        call = LinearCall(
            next(self._numbers),
            (path,),
            direction,
            caller.rows,
            "float32",
            caller.work,
            nbytes,
            caller.deadline,
        )

        def reply(outcome: Outcome) -> None:
            caller.answers.append((self.now, outcome))
            self._go_on(caller, left)

        assert caller.account is not None
        self.queues.put(Work(call, [], reply, caller.account))

    def _compute(self, works: list[Work]) -> None:
        taken = self.fixed + self.per_row * sum(work.call.rows for work in works)
        direction, layer = works[0].call.direction, works[0].call.paths[0].removeprefix("layers.")
        names = [work.client.name for work in works]
        self.batches.append((self.now, self.now + taken, f"{direction[0]}{layer}", names))
        self._computing = works
        self.at(self.now + taken, lambda: self._answer(works, taken))

    def _answer(self, works: list[Work], taken: float) -> None:
        self._computing = None
        self.queues.count(works, taken / 1e3, [4 * work.call.rows for work in works])
        self.queues.answer(works)
        for work in works:
            work.reply([])
