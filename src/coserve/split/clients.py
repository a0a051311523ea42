"""The executor's accounts of its clients: waiting calls, times of messages, computed rows."""

from dataclasses import dataclass, field
from typing import Final

from coserve.split.costs import RecentRate
from coserve.split.key_shares import KeyShare
from coserve.split.messages import ClientStatus, Direction, LinearCall, WorkClass

ACTIVE_SECONDS: Final = 1.0  # seconds without a sign of a client, after which others no longer wait for it
_MOST_SEEN: Final = 1 << 14  # bound on the products of one pass, which is above that of any base
_MEMORY: Final = 0.25  # weight of the newest measurement in the running mean
_OVERDUE: Final = 2.0  # a call is no longer expected after so many times its usual seconds
ProductName = tuple[str, ...]  # the direction, the rows' type, and the paths


def product_of(call: LinearCall) -> ProductName:
    """Name of a call's product: calls with the same name can be computed together."""
    return call.direction, call.dtype, *call.paths


@dataclass(frozen=True, slots=True)
class Expected:
    """A call that will come at about `at`, and is no longer expected from `until` on."""

    product: ProductName
    at: float
    until: float


@dataclass(frozen=True, slots=True)
class _Step:
    """The product that a client calls after another one, and the seconds from an answer to that call."""

    product: ProductName
    seconds: float


@dataclass(slots=True)
class Pass:
    """A client's pass through the model, with the seconds that it waited for others. It ends where the client
    calls a product again. `progress` is the number of groups of linears that it has passed, those within
    spans included."""

    seen: set[ProductName] = field(default_factory=set)
    waited: float = 0.0
    progress: int = 0


@dataclass(slots=True, eq=False)
class ClientAccount:
    """One connection. `heard` is the time of its newest call or answer. Times are seconds of the executor's
    clock."""

    name: str
    joined: float
    share: KeyShare = field(default_factory=KeyShare)  # of its key
    heard: float = float("-inf")  # no call waits for a client that never called
    waiting_calls: int = 0  # without an answer
    waiting_rows: int = 0
    calls: int = 0  # that were answered with a product
    rows: int = 0
    held: float = 0.0  # seconds that its calls waited for others
    newest: tuple[WorkClass, Direction] | None = None  # of its calls
    received: RecentRate = field(default_factory=RecentRate)  # bytes of tensors
    sent: RecentRate = field(default_factory=RecentRate)
    _passes: dict[WorkClass, Pass] = field(default_factory=dict)
    _last: ProductName = ()
    _steps: dict[ProductName, "_Step"] = field(default_factory=dict)

    def add(self, call: LinearCall, now: float) -> Pass:
        """Notes a call that came, and returns the pass that it belongs to."""
        product = product_of(call)
        if self._last and not self.waiting_calls:
            self._learn(product, now - self.heard)
        self.heard, self.newest, self._last = now, (call.work, call.direction), product
        self.waiting_calls += 1
        self.waiting_rows += call.rows
        self.received.add(call.nbytes, now)
        own = self._passes.get(call.work)
        if own is None or product in own.seen or len(own.seen) >= _MOST_SEEN:
            own = self._passes[call.work] = Pass()
        own.seen.add(product)
        return own

    def expected(self, now: float) -> "Expected | None":
        """Its next call, as it followed the same product before. None while one of its calls waits, and where
        the next one is unknown or long overdue."""
        step = self._steps.get(self._last)
        if step is None or self.waiting_calls or now >= (until := self.heard + _OVERDUE * step.seconds):
            return None
        return Expected(step.product, self.heard + step.seconds, until)

    def _learn(self, product: ProductName, seconds: float) -> None:
        step = self._steps.get(self._last)
        if step is None and len(self._steps) >= _MOST_SEEN:
            self._steps.clear()
        if step is not None and step.product == product:
            seconds = step.seconds + _MEMORY * (seconds - step.seconds)
        self._steps[self._last] = _Step(product, seconds)

    def answer(self, call: LinearCall, now: float) -> None:
        """Notes that a call is about to be answered."""
        self.heard = now
        self.waiting_calls -= 1
        self.waiting_rows -= call.rows

    def count(self, call: LinearCall, nbytes: int, now: float) -> None:
        """Notes the product of a call, of `nbytes`."""
        self.calls += 1
        self.rows += call.rows
        self.sent.add(nbytes, now)

    def is_active(self, now: float) -> bool:
        """Tells whether it waits for an answer, or has called or been answered lately."""
        return self.waiting_calls > 0 or now - self.heard < ACTIVE_SECONDS

    def may_call(self, now: float) -> bool:
        """Tells whether a call of this client may come while others wait: it is active, and none of its own
        calls waits."""
        return self.waiting_calls == 0 and self.is_active(now)

    def status(self, now: float) -> ClientStatus:
        """Its figures."""
        return ClientStatus(
            name=self.name,
            work=None if self.newest is None else self.newest[0],
            seconds=now - self.joined,
            calls=self.calls,
            rows=self.rows,
            held_seconds=self.held,
            waiting_calls=self.waiting_calls,
            waiting_rows=self.waiting_rows,
            received_bytes=self.received.total,
            sent_bytes=self.sent.total,
            received_a_second=self.received.a_second(now),
            sent_a_second=self.sent.a_second(now),
        )
