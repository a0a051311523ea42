"""Workers of a cluster without a model or a network, behind the real fleet and the real front: a block's
output is a hash of all that its pages hold, or its state, so that a page or a state that is lost, stale or
another sequence's shows in the next token. Which worker goes on next, which reply comes first, and who dies
is drawn."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.front import ClusterFront, Flight
from coserve.cluster.hosted import BlockSettings, HostedBlock, Outcome, SequenceRows
from coserve.cluster.links import LinkTimer, MeasuredLink
from coserve.cluster.messages import (
    BlockLoaded,
    CancelRows,
    CloseBlock,
    CopyPages,
    LoadBlock,
    Message,
    PassRows,
    RowsFailed,
    RowsPassed,
)
from coserve.cluster.states import StateName
from coserve.core.plan import StateMove
from coserve.errors import WeightsUnreadable

PAGE, LINES, SLOTS = 4, 6, 2


def mixed(*parts: object) -> float:
    """A number that float64 holds exactly."""
    return float(int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big"))


def answer_of(blocks: int, prompt: Sequence[float], count: int) -> list[float]:
    """The plain computation."""
    tokens = list(prompt)
    for _ in range(count):
        values = tokens
        for block in range(blocks):
            values = [mixed(block, values[: end + 1]) for end in range(len(values))]
        tokens.append(mixed("token", values[-1]))
    return tokens[len(prompt) :]


class ScriptedLink:
    """A worker and the scheduler's end of it."""

    def __init__(
        self, world: "FrontWorld", address: str, passed: Callable[..., object], lost: Callable[..., object]
    ) -> None:
        self.world, self.address, self.passed, self.lost = world, address, passed, lost
        self.is_alive, self.queued, self.memory, self.free = True, dict[int, int](), 1000, 1000
        self.links, self.timer = dict[str, MeasuredLink](), LinkTimer()
        self.blocks: dict[int, int] = {}  # by instance
        self.pages: dict[tuple[int, int], list[float | None]] = {}  # by instance and page
        self.states: dict[tuple[int, int], tuple[StateName, list[float]]] = {}  # by instance and place
        self.inbox: deque[tuple[Any, list[Any]]] = deque()
        self.cancelled: set[int] = set()

    def load(self, message: LoadBlock) -> BlockLoaded:
        block = message.first
        self.blocks[message.number] = block
        pages, state = self.world.holds(block)
        return BlockLoaded(message.number, f"block {block}", 1, 1, pages, 4096, b"", state)

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        if isinstance(message, CancelRows):
            self.cancelled |= {*message.numbers}
        elif isinstance(message, CloseBlock):
            self.blocks.pop(message.number, None)
        else:
            self.inbox.append((message, [one.clone() for one in tensors]))

    def work(self) -> None:
        """Does what waits for longest, if it still counts."""
        message, given = self.inbox.popleft()
        if message.number in self.cancelled:
            return
        if isinstance(message, CopyPages):
            held = [list(self.pages[message.instance, page]) for page in message.pages]
            if (moved := message.state) is not None:
                name, values = self.states[message.instance, moved.place]
                assert name == (moved.key, moved.tokens), "the state of another moment is moved"
                held = [list(values)]
            self.to(message.target.address, message, (message, held))
        else:
            self.compute(message, given[0])

    def to(self, address: str, message: Any, what: tuple[Any, Any]) -> None:
        there = self.world.links.get(address)
        if there is None or not there.is_alive or self.world.draw.random() < self.world.broken:
            self.passed(message.number, RowsFailed(message.number, "Unreachable", "no way", address), [])
        elif isinstance(message, CopyPages):
            if message.number not in there.cancelled and (moved := message.state) is not None:
                name = moved.key, moved.tokens
                there.states[message.target.instance, moved.into] = name, what[1][0]
                self.passed(message.number, RowsPassed(message.number), [])
            elif message.number not in there.cancelled:
                into = message.pages if message.into is None else message.into
                for page, values in zip(into, what[1], strict=True):
                    there.pages[message.target.instance, page] = values
                self.passed(message.number, RowsPassed(message.number), [])
        else:
            there.inbox.append(what)

    def compute(self, message: PassRows, hidden: Tensor) -> None:
        hop, rest = message.hops[0], message.hops[1:]
        if (block := self.blocks.get(hop.instance)) is None:
            told = f"the worker at {self.address} has no instance {hop.instance}"
            return self.passed(message.number, RowsFailed(message.number, "RequestError", told), [])
        for page in hop.clean:
            self.pages[hop.instance, page] = [None] * PAGE
        given, out = iter(hidden[:, 0].tolist()), list[float]()
        has_pages, has_states = self.world.holds(block)
        assert len(hop.states) == (len(message.segments) if has_states else 0)
        for number, segment in enumerate(message.segments):
            state, end = list[float](), segment.context + segment.length
            if has_states and segment.context:
                name, values = self.states[hop.instance, hop.states[number].before]
                assert name == (hop.states[number].name, segment.context), "it is the state of another moment"
                state = list(values)
            for position in range(segment.context, end):
                if not has_pages:
                    state.append(next(given))
                    out.append(mixed(block, state))
                    continue
                own = hop.pages_of(number, segment)
                assert max(own) < (self.world.room or 64), "an instance has more pages than it has room for"
                places = [(hop.instance, own[n // PAGE], n % PAGE) for n in range(position + 1)]
                instance, page, offset = places[-1]
                self.pages[instance, page][offset] = next(given)
                values = [self.pages[instance, page][offset] for instance, page, offset in places]
                assert None not in values, "a page is read that has not been filled"
                state += values[-1:]
                assert not has_states or state == values, "a state is not that of the pages"
                out.append(mixed(block, values))
            if has_states:
                step = hop.states[number]
                assert step.after != step.before
                for place in (step.after, *([step.kept] if step.kept >= 0 else [])):
                    self.states[hop.instance, place] = (segment.key, end), list(state)
        passed = torch.tensor(out, dtype=torch.float64)[:, None]
        spent = (*message.seconds, 0.001 * len(out))
        if not rest:
            return self.passed(message.number, RowsPassed(message.number, spent), [passed])
        later = PassRows(message.number, message.scheduler, message.segments, rest, spent)
        return self.to(rest[0].address, later, (later, [passed]))


class DrawnOutcomes(deque[Outcome]):
    """The front's queue: whoever waits has the world go on, and gets any of the outcomes."""

    def __init__(self, world: "FrontWorld") -> None:
        super().__init__()
        self._world = world

    def put(self, one: Outcome) -> None:
        self.append(one)

    def get(self) -> Outcome:
        while not self:
            self._world.advance()
        self.rotate(self._world.draw.randrange(len(self)))
        return self.popleft()


class Told:
    """A sequence as its scheduler has it."""

    def __init__(self, key: int, prompt: list[float], count: int) -> None:
        self.key, self.tokens, self.end = key, prompt, len(prompt) + count
        self.prompt, self.computed, self.pages = list(prompt), 0, list[int]()
        self.line, self.slot = -1, -1  # of its states, and of those that it begins with


class FrontWorld:
    """One drawn world: a scheduler that has several passes under way, and workers that come and go."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.draw = draw = random.Random(seed)
        self.links: dict[str, ScriptedLink] = {}
        self.deaths = self.most_open = self.replaced = 0
        self.deadly, self.broken = draw.choice(((0.0, 0.0), (0.02, 0.0), (0.02, 0.02)))
        self.addresses = addresses = [f"tcp:h{n % 2}:{n + 1}" for n in range(draw.randint(1, 5))]
        self.there = addresses[: draw.randint(1, len(addresses))]  # others come later
        self.count = draw.randint(1, 4)
        load = LoadBlock(0, "m", "f", 0, self.count, "float64", 64, PAGE, LINES, slots=SLOTS)
        self.recurs = draw.random() < 0.5
        self.kept: dict[int, tuple[float, ...]] = {}  # the tokens before states, by slot
        self.lines, self.moves = [*range(LINES)], list[StateMove]()
        patch.setattr("coserve.cluster.fleet.WorkerLink", self.connected)
        patch.setattr("coserve.cluster.pausing._LOOK", 0.0)
        self.room = random.Random(-seed).choice((None, 5, 7, 12))  # pages at an instance, 5 of the longest
        self.fleet = ClusterFleet(
            BlockSettings(load, self.count, draw.randint(1, 2), room=self.room), lambda: self.there, b""
        )
        self.fleet._connect()
        self.fleet.place()
        self.front = ClusterFront(self.fleet, self.chosen if draw.random() < 0.7 else None, resumes=True)
        self.front._outcomes = DrawnOutcomes(self)  # type: ignore[assignment]
        self.free = list(range(draw.choice((10, 16, 40))))
        self.waiting = [
            Told(key, self.prompt(seed, key), draw.randint(1, 5)) for key in range(draw.randint(2, 12))
        ]
        self.running: list[Told] = []
        self.done: list[Told] = []
        self.cached: list[Told] = []  # of these, who keeps pages
        self.flights: deque[tuple[Flight, list[tuple[Told, int]]]] = deque()

    def holds(self, block: int) -> tuple[int, int]:
        """Bytes of a page and of a state in a block: one has no attention, one is of both kinds."""
        if not self.recurs or block == 1:
            return PAGE * 8, 0
        return (0, 64) if block == 2 else (PAGE * 8, 64)

    def connected(self, address: str, key: bytes, scheduler: str, passed: Any, lost: Any) -> ScriptedLink:
        self.links[address] = ScriptedLink(self, address, passed, lost)
        return self.links[address]

    def prompt(self, seed: int, key: int) -> list[float]:
        """Some begin alike."""
        begins = self.draw.choice((0, key))
        return [mixed(seed, begins, n) for n in range(self.draw.randint(1, 14))]

    def chosen(
        self, rows: SequenceRows, before: Any, candidates: Sequence[HostedBlock], *_: Any
    ) -> HostedBlock:
        return self.draw.choice(candidates)

    def advance(self) -> None:
        """A worker does something, or dies and comes back without anything."""
        if self.draw.random() < self.deadly and len(self.links) > 1:
            link = self.draw.choice([*self.links.values()])
            link.is_alive = False
            self.fleet._lose(link)  # type: ignore[arg-type]
            self.fleet._connect()
            self.deaths += 1
        if self.draw.random() < 0.1:
            self.there = self.addresses
            self.fleet._connect()
            before = self.fleet.status()
            self.fleet._replace()
            self.replaced += before != self.fleet.status()
        busy = [link for link in self.links.values() if link.inbox]
        if busy:
            self.draw.choice(busy).work()

    def run(self) -> None:
        """Answers all; each token is that of the plain computation."""
        while self.waiting or self.running or self.flights:
            under_way = {told.key for _, rows in self.flights for told, _ in rows}
            idle = [told for told in self.running if told.key not in under_way]
            self.admit()
            if idle and len(self.flights) < self.front.plans and self.draw.random() < 0.7:
                self.begin(self.draw.sample(idle, self.draw.randint(1, len(idle))))
            elif self.flights:
                self.finish()
            self.most_open = max(self.most_open, len(self.flights))
        for told in self.done:
            count = told.end - len(told.prompt)
            assert told.tokens[len(told.prompt) :] == answer_of(self.count, told.prompt, count), told.key
        for move in self.front._moves:
            if not move.is_done:
                self.front._stop(move)
        rooms = [one.room for one in self.fleet.instances() if one.room is not None]
        self.swept = self.front.sweeper.swept
        assert not any(one._held or one.wanted for one in rooms)
        assert not self.front._open and not self.front._waiting and not self.fleet._under_way
        assert all(one.rows == 0 for one in self.fleet.instances())

    def admit(self) -> None:
        while self.waiting:
            while self.cached and -(-self.waiting[0].end // PAGE) > len(self.free):
                self.release(self.cached.pop(0))
            if -(-self.waiting[0].end // PAGE) > len(self.free):
                return
            if not self.lines:
                return
            told = self.waiting.pop(0)
            told.line = self.lines.pop()
            for slot, tokens in self.kept.items() if self.recurs else ():
                if len(tokens) > told.computed and tuple(told.prompt[:-1][: len(tokens)]) == tokens:
                    found = [o for o in (*self.running, *self.cached) if len(o.pages) * PAGE >= len(tokens)]
                    same = (o for o in found if tuple(o.tokens[: min(len(tokens), o.computed)]) == tokens)
                    if (other := next(same, None)) is not None:
                        told.pages, told.computed = other.pages[: len(tokens) // PAGE], len(tokens)
                        told.slot = slot
            others = () if self.recurs else (*self.running, *self.cached)
            for other in others:  # whole pages with the same tokens are shared
                pairs = zip(told.prompt[:-1], other.tokens[: other.computed], strict=False)
                whole = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]) // PAGE
                if whole > len(told.pages):
                    told.pages, told.computed = other.pages[:whole], whole * PAGE
            fresh = [self.free.pop() for _ in range(-(-told.end // PAGE) - len(told.pages))]
            self.front.clean(fresh)
            told.pages += fresh
            self.running.append(told)

    def begin(self, chosen: Sequence[Told]) -> None:
        rows, parts, counts = [], [], []
        lengths = [self.draw.randint(1, len(told.tokens) - told.computed) for told in chosen]
        self.moves = [StateMove(told.key, told.slot, False) for told in chosen if told.slot >= 0]
        taken = {told.slot for told in (*self.running, *self.waiting)}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        for told, count in zip(chosen, lengths, strict=True):
            if self.recurs and free and not (told.computed + count) % PAGE:
                self.moves.append(StateMove(told.key, free.pop(), True))
        if self.moves:  # such a plan runs alone
            while self.flights:
                self.finish()
        self.front.states.take_up(self.moves)
        for told, count in zip(chosen, lengths, strict=True):
            told.slot = -1

            def embedded(start: int, number: int, told: Told = told) -> Tensor:
                return torch.tensor(told.tokens[start : start + number], dtype=torch.float64)[:, None]

            states = self.front.states.plan(told.key, told.line, told.computed, count)
            rows.append(
                SequenceRows(told.key, count, told.computed, told.pages, "", False, embedded, states=states)
            )
            parts.append(embedded(told.computed, count))
            counts.append((told, count))
        self.flights.append((self.front.begin(rows, torch.cat(parts)), counts))
        if moves := self.moves:
            self.finish()
            named = {told.key: told for told, _ in counts}
            for move in (move for move in moves if move.keeps):
                self.kept[move.slot] = tuple(named[move.key].tokens[: named[move.key].computed])

    def finish(self) -> None:
        flight, rows = self.flights.popleft()
        while True:
            try:
                out = self.front.finish(flight)[:, 0].tolist()
                break
            except WeightsUnreadable:  # workers go away faster than blocks are loaded: the plan runs again
                flight = self.front.begin(flight.rows, flight.hidden)
        at = 0
        for told, count in rows:
            at, told.computed = at + count, told.computed + count
            if told.computed == len(told.tokens):
                told.tokens.append(mixed("token", out[at - 1]))
            if len(told.tokens) == told.end:
                self.running.remove(told)
                self.done.append(told)
                self.cached.append(told)
                self.lines.append(told.line)
                self.front.end(told.key, told.pages, told.computed)
                assert self.front._paused is not None
                self.front._paused.end(told.key, told.pages, told.computed, time.monotonic() - 10.0)

    def release(self, told: Told) -> None:
        kept = {page for other in (*self.running, *self.cached) for page in other.pages}
        self.free += [page for page in told.pages if page not in kept]
