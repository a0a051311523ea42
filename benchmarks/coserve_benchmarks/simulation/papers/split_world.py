"""Clients of a base executor on modelled devices (Symbiosis, section 3): the executor's own queues and
batching policies, on a virtual clock.

A client goes through the model linear by linear. Between two calls its own device computes attention and
adapters; the executor's device computes products. Both are modelled by tables of hardware; the seconds of a
host for a call are parameters.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Final

from coserve.simulate.counting import PassKind, PassWork
from coserve.simulate.hardware import Roofline
from coserve.split.batching import NEVER, BatchingConfig
from coserve.split.clients import ClientAccount
from coserve.split.messages import Direction, GroupShape, LinearCall, WorkClass
from coserve.split.queues import CallQueues
from coserve.split.work import Work
from coserve.workload.shapes import ModelShape

MOST_ROWS: Final = 8192
_GIGA: Final = 1e9
_FORWARD, _BACKWARD = 2, 5  # products of attention


class Device:
    """A device that computes one thing after the other, in the order in which they come."""

    def __init__(self, table: Roofline, slowness: float = 1.0) -> None:
        """It takes `slowness` times as long as the table says."""
        self._table, self._slowness, self._free = table, slowness, 0.0

    def seconds(self, work: PassWork, dtype: str) -> float:
        """Seconds that something takes."""
        return self._slowness * self._table.seconds([work], dtype)

    def end(self, now: float, work: PassWork, dtype: str) -> float:
        """Time at which work that arrives at `now` is done."""
        self._free = max(now, self._free) + self.seconds(work, dtype)
        return self._free


@dataclass(frozen=True, slots=True)
class Link:
    """Between a client and the executor: bytes a second and seconds of a message, each way."""

    gbs: float
    seconds: float

    def takes(self, nbytes: float) -> float:
        """Seconds of a message with so many bytes."""
        return self.seconds + nbytes / (self.gbs * _GIGA)


class Shards:
    """Devices that hold equal parts of all weights, and gather each linear's before its product (FSDP).

    A gather has every device receive the others' parts over the `link`, one gather after the other. The
    executor has an endpoint at each device, which computes the rows of its own clients (3.3).
    """

    def __init__(self, devices: Sequence[Device], link: Link) -> None:
        self.devices, self._link, self._free = devices, link, 0.0

    def gathered(self, now: float, nbytes: float) -> float:
        """Time at which weights of so many bytes are on all devices that are asked for at `now`."""
        if len(self.devices) == 1:
            return now
        parts = len(self.devices)
        self._free = max(now, self._free) + self._link.takes(nbytes * (parts - 1) / parts)
        return self._free


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the executor's host in each product, and for each call in it."""

    product: float
    call: float = 0.0


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear of one layer."""

    name: str
    inputs: int
    outputs: int


def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """The linears of a layer in the order of calls: one each, as in their clients."""
    hidden, inner = shape.hidden, shape.intermediate
    kv = hidden * shape.groups // shape.heads
    return (
        Linear("q", hidden, hidden), Linear("k", hidden, kv), Linear("v", hidden, kv),
        Linear("o", hidden, hidden), Linear("gate", hidden, inner), Linear("up", hidden, inner),
        Linear("down", inner, hidden),
    )  # fmt: skip


@dataclass(slots=True)
class SplitClient:
    """A client with `sequences` of `length` rows each in a pass, after `context` earlier tokens each.

    Its host takes `host` seconds between two calls. One that trains goes forward and back. An `alone` client
    has all linears on its own device, and calls nobody; or it gathers them from `shards`, the next one's
    weights while it computes with this one's. Others call their executor at its shard number `shard`. `ends`
    are the times at which passes were complete.
    """

    name: str
    device: Device
    link: Link
    sequences: int
    length: int
    context: int
    host: float
    work: WorkClass = "inference"
    alone: bool = False
    noise: bool = False  # whether rows are hidden by noise, which is added and taken off again
    ends: list[float] = field(default_factory=list)
    account: ClientAccount | None = None
    shards: Shards | None = None
    shard: int = 0
    fetched: float = 0.0  # when the weights of its next linear are there

    @property
    def rows(self) -> int:
        """Rows of a call."""
        return self.sequences * self.length

    @property
    def pairs(self) -> int:
        """Pairs of a row and one that it attends to, in a layer."""
        return self.sequences * (self.length * self.context + self.length * (self.length + 1) // 2)


@dataclass(frozen=True, slots=True)
class WorldFigures:
    """Of all clients together: seconds of a pass and rows a second by client, and calls in a product."""

    seconds: dict[str, float]
    rows: dict[str, float]
    together: float

    @property
    def mean_seconds(self) -> float:
        """The mean over the clients."""
        return fmean(self.seconds.values())

    @property
    def throughput(self) -> float:
        """Rows a second of all clients."""
        return sum(self.rows.values())


class SplitWorld:
    """Plays clients of one executor."""

    def __init__(
        self, shape: ModelShape, base: Device | Shards, costs: HostCosts, config: BatchingConfig
    ) -> None:
        self._shape, self._costs = shape, costs
        self._base = base if isinstance(base, Shards) else Shards((base,), Link(1.0, 0.0))
        self._shard_of: dict[int, int] = {}  # of calls under way, by their numbers
        self._linears = {
            f"{layer}.{one.name}": one for layer in range(shape.layers) for one in linears(shape)
        }
        groups = [GroupShape(one.inputs, {path: one.outputs}) for path, one in self._linears.items()]
        self._now = 0.0
        self._queues = CallQueues(config, groups, MOST_ROWS, lambda: self._now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._computing = False
        self._batches = self._calls = 0

    def play(self, clients: Sequence[SplitClient], passes: int) -> WorldFigures:
        """Runs all clients until each has made so many passes after its first one, of which the figures
        are."""
        for client in clients:
            client.account = self._queues.join(client.name)
            self._go_on(client, self._calls_of(client))
        while any(len(client.ends) <= passes for client in clients):
            again = self._poll()
            self._now = max(min(again, self._events[0][0] if self._events else NEVER), self._now)
            assert self._now < NEVER, "clients have something under way until all are done"
            while self._events and self._events[0][0] <= self._now:
                heapq.heappop(self._events)[2]()
        rates = {one.name: (len(one.ends) - 1) / (one.ends[-1] - one.ends[0]) for one in clients}
        return WorldFigures(
            {name: 1 / rate for name, rate in rates.items()},
            {one.name: one.rows * rates[one.name] for one in clients},
            self._calls / max(self._batches, 1),
        )

    def _poll(self) -> float:
        """Has the executor compute what its policy chooses; when to ask again."""
        while not self._computing:
            works, again = self._queues.poll()
            if not works:
                return max(again, self._now + 1e-9)  # what rounding makes equal would be asked for ever
            self._compute(works)
        return NEVER

    def _calls_of(self, client: SplitClient) -> Iterator[tuple[Direction, str]]:
        """Calls of one pass after the other; the end of each is noted."""
        while True:
            yield from (("forward", path) for path in self._linears)
            if client.work == "training":
                yield from (("backward", path) for path in reversed(self._linears))
            client.ends.append(self._now)

    def _go_on(self, client: SplitClient, left: Iterator[tuple[Direction, str]], last: str = "") -> None:
        """Has a client compute what comes before its next call, and call."""
        direction, path = next(left)
        at = self._now + client.host
        if last and last.partition(".")[2] == ("v" if direction == "forward" else "o"):
            at = client.device.end(at, self._attention(client, direction), self._shape.dtype)
        if client.alone:
            at = self._own_product(client, path, at)
            self._at(at, lambda: self._go_on(client, left, path))
            return
        sent, answered = self._messages(client, path, direction)
        self._at(at + sent, lambda: self._call(client, left, direction, path, answered))

    def _call(
        self,
        client: SplitClient,
        left: Iterator[tuple[Direction, str]],
        direction: Direction,
        path: str,
        answered: float,
    ) -> None:
        call = LinearCall(next(self._numbers), (path,), direction, client.rows, "bfloat16", client.work, 0)
        self._shard_of[call.number] = client.shard
        assert client.account is not None, "clients join first"

        def reply(outcome: object) -> None:
            self._at(self._now + answered, lambda: self._go_on(client, left, path))

        self._queues.put(Work(call, [], reply, client.account))

    def _compute(self, works: list[Work]) -> None:
        self._computing = True
        self._batches += 1
        self._calls += len(works)
        path, begun, costs = works[0].call.paths[0], self._now, self._costs
        calls = [0] * len(self._base.devices)
        rows = calls.copy()
        for work in works:
            shard = self._shard_of.pop(work.call.number)
            calls[shard] += 1
            rows[shard] += work.call.rows
        gathered = self._base.gathered(begun, self._weight_bytes(path))
        end = begun
        for shard, device in enumerate(self._base.devices):
            if calls[shard]:  # the others give their parts away
                ready = max(gathered, begun) + costs.product + calls[shard] * costs.call
                end = max(end, device.end(ready, self._product(path, rows[shard]), self._shape.dtype))

        def done() -> None:
            self._computing = False
            self._queues.count(works, self._now - begun, [0] * len(works))
            self._queues.answer(works)
            for work in works:
                work.reply([])

        self._at(end, done)

    def _own_product(self, client: SplitClient, path: str, at: float) -> float:
        """Time at which the product of a client alone is done that it comes to at `at`."""
        if client.shards is not None:
            at = max(at, client.fetched)
            client.fetched = client.shards.gathered(at, self._weight_bytes(path))
        return client.device.end(at, self._product(path, client.rows), self._shape.dtype)

    def _weight_bytes(self, path: str) -> int:
        one = self._linears[path]
        return one.inputs * one.outputs * self._shape.item_bytes

    def _product(self, path: str, rows: int) -> PassWork:
        nbytes = self._weight_bytes(path)
        flops = 2 * rows * nbytes // self._shape.item_bytes
        return PassWork(PassKind.FORWARD, 0, rows, flops=flops, weight_bytes=nbytes)

    def _attention(self, client: SplitClient, direction: Direction) -> PassWork:
        shape = self._shape
        products = _FORWARD if direction == "forward" else _BACKWARD + _FORWARD
        token = 2 * shape.hidden * shape.groups // shape.heads * shape.item_bytes
        cached = client.sequences * (client.context + client.length)
        return PassWork(
            PassKind.FORWARD,
            1,
            client.rows,
            attention_flops=2 * products * client.pairs * shape.hidden,
            cache_bytes=cached * token,
        )

    def _messages(self, client: SplitClient, path: str, direction: Direction) -> tuple[float, float]:
        """Seconds of a call's message and of its answer; noise is added to one and taken off the other."""
        one, item = self._linears[path], self._shape.item_bytes
        there, back = (one.inputs, one.outputs)[:: 1 if direction == "forward" else -1]
        sizes = (client.rows * there * item, client.rows * back * item)
        sent, answered = (client.link.takes(nbytes) for nbytes in sizes)
        if client.noise:  # reads rows and noise, writes their sum
            sent, answered = sent + self._noise(client, sizes[0]), answered + self._noise(client, sizes[1])
        return sent, answered

    def _noise(self, client: SplitClient, nbytes: float) -> float:
        work = PassWork(PassKind.FORWARD, 1, 1, cache_bytes=3 * nbytes)
        return client.device.seconds(work, self._shape.dtype)

    def _at(self, then: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (then, next(self._numbers), happens))
