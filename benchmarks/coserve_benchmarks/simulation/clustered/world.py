"""The simulated cluster: requests pass their chains of blocks, which the policies of `coserve.cluster` choose
instances for, on devices and links that take time.

What is simulated is what policies act on: queues, batches, transfers, pages and where they are, memory,
loading. Seconds of passes come from profiles, so results are those of a model of costs, whatever the policies
do with it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

from coserve.cluster.agent import precedence
from coserve.cluster.coordination import PagesCopy, redundant_copies
from coserve.cluster.dispatch import SCHEDULER, WAYS, Dispatch, DispatchEstimate
from coserve.cluster.links import LinkTimer
from coserve.cluster.meeting import Meeting, PageMove
from coserve.cluster.placement import DependenceCounter
from coserve.cluster.records import BlockInstance, ChainRequest, ClusterLink, ClusterView, ClusterWorker
from coserve.cluster.scaling import AddInstance, scale
from coserve.errors import ConfigError
from coserve_benchmarks.simulation.clustered.device import SimulatedInstance, VirtualEvents, WaitingRows, Wire
from coserve_benchmarks.simulation.clustered.setting import (
    ClusterAsk,
    ClusterOutcome,
    ClusterSample,
    ClusterSetting,
)

_PATIENCE: Final = 4.0  # of a chunk of pages, in its own seconds
_RECOVERED: Final = 0.05  # of what a rate of recomputing is below that of an idle device, at each look


@dataclass(slots=True)
class _Answer:
    """A request under way; `pages` are tokens by block and worker, `tokens` those that all blocks have
    passed."""

    key: int
    ask: ClusterAsk
    chain: tuple[str, ...]
    rows: int
    tokens: int = 0
    made: int = 0
    place: int = 0
    at: str = SCHEDULER
    pages: dict[str, dict[str, int]] = field(default_factory=dict)
    stood_in: int = 0  # rows in blocks that stand in for the chain's
    ended: float | None = None

    @property
    def passes(self) -> int:
        """Rows of the whole answer through all of its blocks: its last token passes none."""
        return (self.ask.prompt + self.ask.answer - 1) * len(self.chain)


@dataclass(slots=True)
class _Device:
    """A worker's device: its instances, and chunks of pages to recompute between passes."""

    worker: ClusterWorker
    instances: dict[str, SimulatedInstance] = field(default_factory=dict)
    chunks: deque[tuple[float, float, Callable[[], None]]] = field(default_factory=deque)  # when, how long
    is_busy: bool = False
    busy_until: float = 0.0
    computed: float = 0.0

    def computed_at(self, now: float) -> float:
        """Seconds that it has computed, of the pass under way those that are over."""
        return self.computed - max(self.busy_until - now, 0.0)


@dataclass(frozen=True)
class _SeenLinks(Mapping[tuple[str, str], ClusterLink]):
    """Links between workers as what went over them has shown, or else as they are `said` to be."""

    said: Mapping[tuple[str, str], ClusterLink]
    hosts: Mapping[str, str]
    timers: Mapping[tuple[str, str], LinkTimer]
    now: float

    def __getitem__(self, pair: tuple[str, str]) -> ClusterLink:
        timer = self.timers.get((self.hosts[pair[0]], self.hosts[pair[1]]))
        known = None if timer is None else timer.measured
        return self.said[pair] if known is None else known.faded(self.said[pair], self.now)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.said)

    def __len__(self) -> int:
        return len(self.said)


class SimulatedCluster:
    """A cluster that answers one load."""

    def __init__(self, setting: ClusterSetting) -> None:
        self.setting, self.events = setting, VirtualEvents()
        self._dispatch = Dispatch(setting.dispatch)
        self._devices = {worker.name: _Device(worker) for worker in setting.workers}
        self._hosts = {SCHEDULER: SCHEDULER} | {one.name: one.host for one in setting.workers}
        self._wires: dict[tuple[str, str], Wire] = {}  # by hosts
        self._timers: dict[tuple[str, str], LinkTimer] = {}
        self._messages = count()
        names = [SCHEDULER, *self._devices]
        self._links = {(a, b): self._link(a, b) for a in names for b in self._devices if a != b}
        self._workers = {worker.name: worker for worker in setting.workers}
        self._holders: Counter[tuple[str, str]] = Counter()  # open answers with pages, by worker and block
        self._answers: list[_Answer] = []
        self._open: dict[int, _Answer] = {}
        self._parked: list[_Answer] = []
        self.traffic = DependenceCounter()
        self._sent, self._unfinished = 0.0, 0
        self._loads = self._added = self._recomputed = self._copied = 0
        self._passes = [0, 0]  # rows through blocks of their chain, and through those that stand in for one
        self._watch: Callable[[ClusterSample], object] = lambda _: None
        for content, places in setting.placed.items():
            for name in places:
                self._load(name, content, 0.0)

    def play(
        self, asks: Sequence[ClusterAsk], watch: Callable[[ClusterSample], object] | None = None
    ) -> ClusterOutcome:
        """Answers all requests; `watch` is given a sample at each look. Raises ConfigError where some can
        never be answered, as nobody has room."""
        self._watch = watch or self._watch
        for key, ask in enumerate(asks):
            answer = _Answer(key, ask, self.setting.chains[ask.application], ask.prompt)
            self._answers.append(answer)
            self.events.at(ask.at, partial(self._come, answer))
        self._loads, self._unfinished = 0, len(asks)
        self.events.at(self.setting.look, self._look)
        while self._unfinished and self.events.step():
            pass
        if any(one.ended is None for one in self._answers):
            raise ConfigError("a request is never answered: no worker has room for its pages and blocks")
        latencies = tuple((one.ended or 0.0) - one.ask.at for one in self._answers)
        begun, ended = min(one.at for one in asks), max(one.ended or 0.0 for one in self._answers)
        return ClusterOutcome(
            latencies,
            sum(one.answer for one in asks) / (ended - begun),
            sum(wire.nbytes for (a, b), wire in self._wires.items() if a != b),
            sum(wire.nbytes for (a, b), wire in self._wires.items() if a == b),
            sum(one.computed for one in self._devices.values()) / len(self._devices) / (ended - begun),
            self._sent,
            tuple(one.stood_in / one.passes for one in self._answers),
            self._loads,
            self._added,
            self._recomputed,
            self._copied,
        )

    def view(self) -> ClusterView:
        """The live record of all instances: what the scheduler and, here, agents decide by."""
        instances = []
        most = self.setting.batch_rows
        for name, device in self._devices.items():
            for content, one in device.instances.items():
                queue = one.batches(most)
                idle_since = None if queue or self._holders[name, content] else one.last_used
                instances.append(
                    BlockInstance(name, content, queue, most, self.setting.most_queued, idle_since)
                )
        links = _SeenLinks(self._links, self._hosts, self._timers, self.events.now)
        return ClusterView(self._workers, self.setting.blocks, tuple(instances), links)

    def _hold(self, answer: _Answer, content: str, worker: str, tokens: int) -> None:
        """Has a worker keep pages of so many of an answer's tokens, and room for them; none with 0."""
        held = answer.pages.setdefault(content, {})
        before = held.pop(worker, None)
        if tokens or answer.at == worker:
            held[worker] = tokens
        self._holders[worker, content] += (worker in held) - (before is not None)
        self._use(worker, (tokens - (before or 0)) * self.setting.blocks[content].token_nbytes)

    def _use(self, worker: str, nbytes: int) -> None:
        record = self._workers[worker]
        self._workers[worker] = replace(record, used=record.used + nbytes)

    def _link(self, sender: str, receiver: str) -> ClusterLink:
        same = self._hosts[sender] == self._hosts[receiver]
        return self.setting.within if same else self.setting.between

    def _come(self, answer: _Answer) -> None:
        self._open[answer.key] = answer
        self._sent_on(answer)

    def _sent_on(self, answer: _Answer) -> None:
        """Dispatches a request to its next block; it waits where nobody has room."""
        content = answer.chain[answer.place]
        pages = {one: dict(held) for one, held in answer.pages.items()}
        request = ChainRequest(answer.key, answer.tokens, answer.rows, pages, self.setting.approximates)
        found = self._dispatch.choose(self.view(), request, content, answer.at)
        if found is None:
            self._parked.append(answer)
            return
        device = self._devices[found.worker]
        for gone in found.evicted:
            self._unload(found.worker, gone)
        if found.content not in device.instances:
            swap = sum(self.setting.blocks[one].nbytes for one in found.evicted) / device.worker.memory_rate
            swap += self.setting.blocks[found.content].nbytes / device.worker.load_rate
            self._load(found.worker, found.content, self.events.now + swap)
        base = request.held(found.content, found.worker)
        block = self.setting.blocks[found.content]
        nbytes = answer.rows * block.row_nbytes if answer.at != found.worker else 0
        then = partial(self._rows_there, answer, found, base)
        sender, answer.at = answer.at, found.worker
        self._hold(
            answer, found.content, found.worker, answer.tokens
        )  # room for those that come is taken now
        self._send(sender, found.worker, nbytes, then)

    def _rows_there(self, answer: _Answer, found: DispatchEstimate, base: int) -> None:
        if found.plan is None or base >= answer.tokens:
            return self._queue(answer, found, returns=found.holds_pages)
        base -= base % self.setting.dispatch.page
        block, worker = self.setting.blocks[found.content], self._workers[found.worker]
        link = None if found.source is None else self._links[found.source, found.worker]
        page = self.setting.dispatch.page
        move = PageMove(
            answer.tokens - base, block.token_nbytes, page, link, worker.recompute_rate, block.input_nbytes
        )
        meeting = Meeting(move, self.setting.chunk, WAYS[self.setting.dispatch.rule])
        self._drive(meeting, answer, found)

    def _drive(self, meeting: Meeting, answer: _Answer, found: DispatchEstimate) -> None:
        """Begins what is next at either end of a move."""
        if meeting.is_done:
            return self._queue(answer, found, returns=True)
        now = self.events.now
        if (tokens := meeting.next_recomputed()) is not None:
            device = self._devices[found.worker]
            count = len(tokens)
            self._recomputed += count

            def recomputed() -> None:
                meeting.recomputed(self.events.now - now)
                record = self._workers[found.worker]
                rate = (record.recompute_rate + count / (self.events.now - now)) / 2
                self._workers[found.worker] = replace(record, recompute_rate=rate)
                self._drive(meeting, answer, found)

            def given() -> None:
                seconds = count / device.worker.recompute_rate
                device.chunks.append((self.events.now, seconds, recomputed))
                self._serve(device)

            sender = found.source or found.worker
            nbytes = count * self.setting.blocks[found.content].input_nbytes
            self._send(sender, found.worker, nbytes, given)
        if (tokens := meeting.next_copied()) is not None:
            assert found.source is not None, "there is a link"
            self._copied += len(tokens)

            def copied() -> None:
                meeting.copied(self.events.now - now)
                self._drive(meeting, answer, found)

            nbytes = len(tokens) * self.setting.blocks[found.content].token_nbytes
            self._send(found.source, found.worker, nbytes, copied)

    def _send(self, sender: str, receiver: str, nbytes: float, arrives: Callable[[], None]) -> None:
        if sender == receiver or not nbytes:
            self.events.at(self.events.now, arrives)
            return
        ends = self._hosts[sender], self._hosts[receiver]
        if ends not in self._wires:
            link = self.setting.others.get(ends, self._links[sender, receiver])
            self._wires[ends], self._timers[ends] = Wire(link.rate, link.latency), LinkTimer()
        timer, number = self._timers[ends], next(self._messages)
        timer.sent(number, nbytes, self.events.now)

        def arrived() -> None:
            timer.came(number, self.events.now)
            arrives()

        self._sent += self._wires[ends].send(self.events, nbytes, arrived)

    def _load(self, name: str, content: str, ready_at: float) -> None:
        self._devices[name].instances[content] = SimulatedInstance(content, ready_at, last_used=ready_at)
        self._use(name, self.setting.blocks[content].nbytes)
        self._loads += 1
        self.events.at(ready_at, partial(self._serve, self._devices[name]))

    def _unload(self, name: str, content: str) -> None:
        del self._devices[name].instances[content]
        self._use(name, -self.setting.blocks[content].nbytes)

    def _queue(self, answer: _Answer, found: DispatchEstimate, returns: bool) -> None:
        device = self._devices[found.worker]
        behind = len(answer.chain) - answer.place - 1
        waiting = WaitingRows(
            answer.key, answer.rows, self.events.now, returns, behind, answer.ask.application
        )
        if found.content not in device.instances:  # scaled away meanwhile
            return self._sent_on(answer)
        device.instances[found.content].put(waiting)
        self._serve_soon(device)

    def _serve_soon(self, device: _Device) -> None:
        """Has a device go on once all that comes at this very time is there: rows that have passed one of its
        blocks are in the queue of the next."""
        self.events.at(self.events.now, partial(self._serve, device))

    def _serve(self, device: _Device) -> None:
        """An idle device begins the next pass, or a chunk of pages where none waits; a chunk waits for
        `_PATIENCE` times its own seconds at most, so that others' rows bear a part of it."""
        if device.is_busy:
            return
        ready = [one for one in device.instances.values() if one.first and one.ready_at <= self.events.now]
        since, seconds, done = device.chunks[0] if device.chunks else (0.0, 0.0, None)
        if done is not None and (not ready or self.events.now - since >= _PATIENCE * seconds):
            device.chunks.popleft()
            self._compute(device, seconds, done)
        elif ready:
            instance = min(ready, key=self._order)
            taken = instance.take(self.setting.batch_rows)
            groups = len({one.group for one in taken})
            profile = self.setting.blocks[instance.content].profile
            seconds = profile.seconds(sum(one.rows for one in taken)) + (groups - 1) * self.setting.branches
            self._compute(device, seconds, partial(self._passed, device, instance, taken))

    def _order(self, one: SimulatedInstance) -> tuple[bool, int, float]:
        assert one.first is not None, "rows wait there"
        return precedence(one.first.behind, one.first.since, self.events.now)

    def _compute(self, device: _Device, seconds: float, done: Callable[[], None]) -> None:
        device.is_busy = True
        device.computed += seconds
        device.busy_until = self.events.now + seconds

        def ended() -> None:
            device.is_busy = False
            done()
            self._serve_soon(device)

        self.events.at(device.busy_until, ended)

    def _passed(self, device: _Device, instance: SimulatedInstance, taken: Sequence[WaitingRows]) -> None:
        instance.under_way, instance.last_used = [], self.events.now
        for waiting in taken:
            answer = self._open[waiting.key]
            self._hold(answer, instance.content, device.worker.name, answer.tokens + answer.rows)
            block = self.setting.blocks[instance.content]
            stands_in = instance.content != answer.chain[answer.place]
            self._passes[stands_in] += answer.rows
            answer.stood_in += answer.rows * stands_in
            answer.place += 1
            if answer.place < len(answer.chain):
                following = answer.chain[answer.place]
                self.traffic.note(block.content, following, answer.rows * block.row_nbytes, self.events.now)
            else:
                answer.place, answer.tokens = 0, answer.tokens + answer.rows
                answer.rows, answer.made = 1, answer.made + 1
            if answer.made == answer.ask.answer:
                answer.ended, self._unfinished = self.events.now, self._unfinished - 1
                self._drop_pages(answer)
                del self._open[answer.key]
                parked, self._parked = self._parked, []
                for other in parked:
                    self._sent_on(other)
            else:
                self._sent_on(answer)

    def _drop_pages(self, answer: _Answer) -> None:
        """Frees all pages of an answer."""
        answer.at = SCHEDULER
        for content, held in answer.pages.items():
            for worker in [*held]:
                self._hold(answer, content, worker, 0)

    def _look(self) -> None:
        """Sweeps copies, scales, and tries again what found no room."""
        now = self.events.now
        self._watch(self._sample())
        if now % self.setting.sweep < self.setting.look:
            self._sweep()
        for device in self._devices.values():  # a rate that was low under load is tried again in time
            record, own = self._workers[device.worker.name], device.worker.recompute_rate
            rate = record.recompute_rate + _RECOVERED * (own - record.recompute_rate)
            self._workers[record.name] = replace(record, recompute_rate=rate)
        if self.setting.scaling is not None:
            self._scale()
        parked, self._parked = self._parked, []
        for answer in parked:
            self._sent_on(answer)
        if len(self._parked) < self._unfinished:  # else nothing will ever make room for those that wait
            self.events.at(now + self.setting.look, self._look)

    def _sample(self) -> ClusterSample:
        blocks = sum(
            self.setting.blocks[content].nbytes for one in self._devices.values() for content in one.instances
        )
        used = sum(one.used for one in self._workers.values())
        computed = sum(one.computed_at(self.events.now) for one in self._devices.values())
        own, stand_ins = self._passes
        return ClusterSample(self.events.now, computed, own, stand_ins, blocks, used - blocks)

    def _sweep(self) -> None:
        """Drops copies of those requests whose rows are in no move: only the last place that they were at is
        kept."""
        copies = [
            PagesCopy(one.key, content, worker, tokens, int(worker == one.at or tokens == one.tokens))
            for one in self._open.values()
            for content, held in one.pages.items()
            for worker, tokens in held.items()
        ]
        for copy in redundant_copies(copies, {}, self._open):
            self._hold(self._open[copy.key], copy.content, copy.worker, 0)

    def _scale(self) -> None:
        pages: dict[tuple[str, str], dict[int, int]] = {}
        for one in self._open.values():
            for content, held in one.pages.items():
                for worker, tokens in held.items():
                    nbytes = tokens * self.setting.blocks[content].token_nbytes
                    pages.setdefault((worker, content), {})[one.key] = nbytes
        assert self.setting.scaling is not None
        for change in scale(self.view(), pages, self.events.now, self.setting.scaling):
            if isinstance(change, AddInstance):
                rate = self._devices[change.worker].worker.load_rate
                nbytes = self.setting.blocks[change.content].nbytes
                self._load(change.worker, change.content, self.events.now + nbytes / rate)
                self._added += 1
                for key in change.moved:
                    self._move_pages(key, change.content, change.source, change.worker)
            elif not any(
                self._open[key].pages.get(change.content) for key in change.moved if key in self._open
            ):
                self._unload(change.worker, change.content)

    def _move_pages(self, key: int, content: str, source: str, target: str) -> None:
        """Pages of a request go along with a new instance; they are of use where they arrive before their
        request has moved on."""
        tokens = self._open[key].pages[content][source]

        def arrived() -> None:
            if (answer := self._open.get(key)) is not None and content in answer.pages:
                there = max(answer.pages[content].get(target, 0), min(tokens, answer.tokens))
                self._hold(answer, content, target, there)

        self._send(source, target, tokens * self.setting.blocks[content].token_nbytes, arrived)
