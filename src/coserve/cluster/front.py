"""The ways of passes' rows through the blocks of a cluster, several passes at once.

A sequence's rows go to the instances that dispatch chooses, owners of its pages first (BlockLLM, 5.3). Where
one lacks pages, they are copied from another, recomputed from the front, or both until they meet (5.1).
States of recurrent layers cannot meet: they are copied with the pages, or rows are computed again from the
newest state that was kept. Whatever is lost with a worker is loaded and computed again elsewhere: no request
fails for it.

A pass is a *flight*. Its rows travel in groups that go the same way. Each group is a task: a generator that
sends something and yields until its reply is there. Replies of all tasks come in one queue, so that one
thread drives all flights, and workers compute for different passes at the same time.

What an instance holds is counted page by page, with the tokens that are in each: a page whose bytes nobody
has confirmed is not read.
"""

import itertools
import queue
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import torch
from msgspec import structs
from torch import Tensor

from coserve.cluster.choosing import ChooseInstance, LiveDispatch, live_link, measured_profile
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.hosted import HostedBlock, Outcome, Outcomes, SequencePages, SequenceRows
from coserve.cluster.links import MeasuredLink
from coserve.cluster.meeting import Meeting, MovingPages, PageMove
from coserve.cluster.messages import CopyPages, Hop, MovedState, PassRows, RowSegment, RowsPassed, StateStep
from coserve.cluster.pausing import PausedSequences
from coserve.cluster.records import ClusterLink
from coserve.cluster.speculation import bottlenecks, speculated_places
from coserve.cluster.states import SequenceStates, StateName, StatePlan
from coserve.cluster.sweeping import PageSweeper, holding
from coserve.errors import CoserveError, Unreachable, WeightsUnreadable

_ATTEMPTS: Final = 8  # of a pass while workers are lost; then the plan waits
_COPIED: Final = 128  # tokens of pages that are copied at once
_COMPUTED: Final = 512  # and computed again at a known rate: smaller passes read the weights more often
_RECOMPUTED: Final = 1e3  # tokens a second of recomputing before any are measured

Steps: TypeAlias = Generator[None, Outcome, None]  # of a task: it is sent the outcome of what it has begun


class _Again(Exception):
    """A worker or a link was lost; what was under way has to be done again."""


@dataclass(eq=False)
class Flight:
    """The rows [rows, width] of a pass on their way: `left` are places of sequences that no task takes there,
    `tasks` the number of those under way. `out` has what has come back. `attempts` counts how often rows were
    `lost`."""

    rows: Sequence[SequenceRows]
    hidden: Tensor
    out: Tensor
    left: list[int]
    writes: frozenset[int]  # pages that its rows fill
    tasks: int = 0
    attempts: int = 0
    lost: bool = False
    error: CoserveError | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        """Tells whether all rows are back, or will never be."""
        return not self.tasks and (self.error is not None or not self.left)

    def spans(self) -> list[slice]:
        """The rows of each sequence."""
        ends = list(itertools.accumulate(one.length for one in self.rows))
        return [slice(end - one.length, end) for one, end in zip(self.rows, ends, strict=True)]


class ClusterFront:
    """Takes rows through the blocks of a `fleet`, those of up to `plans` passes at once: of as many as
    workers have blocks, so that all of them may compute. One thread calls it."""

    def __init__(
        self,
        fleet: ClusterFleet,
        choose: ChooseInstance | None = None,
        moving: MovingPages = MovingPages.MEET,
        resumes: bool = False,
    ) -> None:
        """With `resumes`, sequences that have ended may be resumed, and their pages move ahead of that."""
        self.fleet, self.moving, self.settings = fleet, moving, fleet.settings
        self.choose: ChooseInstance = LiveDispatch(self.settings.row_nbytes) if choose is None else choose
        self.copied = self.recomputed = 0  # tokens of pages that were brought, over all blocks
        self.right = self.wrong = 0  # predictions of surrogates
        self.moved = 0  # times that pages have moved before somebody needed them
        self.states = SequenceStates(fleet.settings.load)
        self.copied_states = 0
        self._paused = PausedSequences(self.settings.page_size) if resumes else None
        self._moves: list[Flight] = []  # of such pages, with no rows
        self.sweeper = PageSweeper(self.settings.page_size)
        self.plans = max(len({one.worker.address for one in fleet.instances()}), 1)
        self.waited = self.passing = 0.0  # seconds of waiting here, and of all flights that have ended
        self._pieces = max(self.settings.blocks // self.plans, 1)  # groups of one pass that go the same way
        self._open: list[Flight] = []
        self._outcomes: Outcomes = queue.SimpleQueue()
        self._waiting: dict[int, tuple[Flight, Steps]] = {}  # who began what, by number
        self._current: tuple[Flight, Steps] | None = None  # the task that runs

    def clean(self, pages: Sequence[int]) -> None:
        """Pages have a new owner: nothing in them counts any more. Moves that fill them end before."""
        for move in self._moves:
            if not move.is_done and not move.writes.isdisjoint(pages):
                self._stop(move)
        if self._paused is not None:
            self._paused.forget(pages)
        for one in self.fleet.instances():
            one.drop(pages)

    def begin(self, rows: Sequence[SequenceRows], hidden: Tensor) -> Flight:
        """Sends rows [rows, width] of some sequences, one behind the other, on their way through all blocks.
        No other flight has rows of these sequences."""
        size = self.settings.page_size
        writes = (one.pages[one.context // size : -(-(one.context + one.length) // size)] for one in rows)
        pages = frozenset(itertools.chain.from_iterable(writes))
        flight = Flight(rows, hidden, torch.empty_like(hidden), list(range(len(rows))), pages)
        self._open.append(flight)
        self._set_out(flight)
        if self._paused is not None:
            self._paused.forget(itertools.chain.from_iterable(one.pages for one in rows))
            self._move_ahead(self._paused)
        return flight

    def end(self, key: int, pages: Sequence[int], tokens: int) -> None:
        """A sequence has ended, with so many tokens in its pages."""
        self.states.end(key)
        self.sweeper.end(key)
        if self._paused is not None:
            self._paused.end(key, pages, tokens, time.monotonic())

    def is_filling(self, pages: Sequence[int]) -> bool:
        """Tells whether a flight fills some of these pages."""
        return any(not one.writes.isdisjoint(pages) for one in self._open)

    def finish(self, flight: Flight) -> Tensor:
        """The rows of a flight, once all are back; others go on meanwhile. Raises WeightsUnreadable while
        blocks are missing, and the error of a worker that computes and fails."""
        began = time.monotonic()
        while not flight.is_done:
            self._take(self._outcomes.get())
        self.waited += time.monotonic() - began
        self.passing += flight.ended - flight.began
        self._open.remove(flight)
        if flight.error is not None:
            raise flight.error
        return flight.out

    # Tasks

    def _take(self, outcome: Outcome) -> None:
        """Has the task that waits for an outcome go on; one that comes late is nobody's."""
        if (found := self._waiting.pop(outcome.number, None)) is not None:
            flight, task = found
            flight.ended = outcome.at
            self._go_on(flight, task, outcome)

    def _go_on(self, flight: Flight, task: Steps, outcome: Outcome | None) -> None:
        """Runs a task until it waits again, or ends."""
        self._current = flight, task
        try:
            if outcome is None:
                next(task)
            else:
                task.send(outcome)
            return
        except StopIteration:
            pass
        except CoserveError as error:
            flight.error = flight.error or error
        flight.tasks -= 1
        waiting = [one for one in self._open if one.left and not one.tasks and one is not flight]
        for one in (flight, *waiting):  # the pages that the task has held may make room
            if not one.tasks:
                self._set_out(one)

    def _start(self, instances: Sequence[HostedBlock]) -> int:
        """A number for something that the task at hand begins at instances; it is sent the outcome."""
        number = self.fleet.start(instances, self._outcomes)
        assert self._current is not None, "a task begins things"
        self._waiting[number] = self._current
        return number

    def _failed(self, outcome: Outcome, instances: Sequence[HostedBlock]) -> Exception:
        """Notes that something did not come back. Returns the error of a worker that computes and fails, or
        that it has to be done again."""
        return self.fleet.failed(outcome.number, outcome.message, instances) or _Again()

    # Passes

    def _set_out(self, flight: Flight) -> None:
        """Sends the rows that are left on their way, as far as there is room for their pages: the others wait
        until a task that holds pages ends."""
        while flight.left and flight.error is None:
            flight.attempts, flight.lost = flight.attempts + flight.lost, False
            if flight.attempts == _ATTEMPTS:
                told = "workers of the cluster go away faster than their blocks are loaded again"
                flight.error = WeightsUnreadable(told)
                return
            try:
                ways = self._ways(flight)
            except _Again:
                flight.lost = True
                continue
            except CoserveError as error:
                flight.error = WeightsUnreadable(str(error))
                return
            ways = {place: way for place, way in ways.items() if self._hold(flight.rows[place], way)}
            flight.left = [place for place in flight.left if place not in ways]
            if not ways:
                return
            alone = [place for place in ways if flight.rows[place].surrogates]  # each verified by itself
            others = {place: way for place, way in ways.items() if place not in alone}
            groups = [*_grouped(others, self._pieces), *([place] for place in alone)]
            flight.tasks = len(groups)
            for places in groups:
                self._go_on(flight, self._journey(flight, places, ways[places[0]]), None)
            return

    def _ways(self, flight: Flight) -> dict[int, list[HostedBlock]]:
        """An instance of each block for the rows that are left, by their places. Raises _Again where a worker
        goes meanwhile, and the error of workers that cannot load a block which nobody has."""
        if any(not self.fleet.instances(block) for block in range(self.settings.blocks)):
            self.fleet.place()
        planned: dict[int, int] = {}  # rows that are to go to instances
        return {place: self._way(flight.rows[place], planned) for place in sorted(flight.left)}

    def _way(self, rows: SequenceRows, planned: dict[int, int]) -> list[HostedBlock]:
        """An instance of each block. Raises _Again where one has none."""
        way: list[HostedBlock] = []
        there = self.fleet.instances()
        for block in range(self.settings.blocks):
            own = [one for one in there if one.block == block]
            if not own:
                raise _Again
            candidates = [one for one in own if not one.is_leaving] or own
            chosen = candidates[0]
            if len(candidates) > 1:
                before = way[-1] if way else None
                chosen = self.choose(rows, before, candidates, planned, self.settings.page_size)
            planned[chosen.number] = planned.get(chosen.number, 0) + rows.length
            way.append(chosen)
        return way

    def _journey(self, flight: Flight, places: Sequence[int], way: Sequence[HostedBlock]) -> Steps:
        """The task of rows that go one way: their pages are brought, then they pass leg after leg. Rows whose
        worker is lost are left."""
        rows, spans = [flight.rows[place] for place in places], flight.spans()
        lengths = [one.length for one in rows]
        for one in way:
            one.rows += sum(lengths)
        try:
            bring = self._bring_states if any(one.loaded.state_nbytes for one in way) else self._bring
            for own in rows:
                yield from bring(own, way)
            hidden = torch.cat([flight.hidden[spans[place]] for place in places])
            for leg in self._legs(way):
                hidden = yield from self._pass(rows, leg, hidden, self._predicted(rows, way))
            for place, passed in zip(places, torch.split(hidden, lengths), strict=True):
                flight.out[spans[place]] = passed
            for own in rows if self.settings.room is not None else ():
                self.sweeper.passed(own, way, time.monotonic())
        except _Again:
            flight.left, flight.lost = [*flight.left, *places], True
        finally:
            for one in way:
                one.rows -= sum(lengths)
                if one.room is not None:
                    for own in rows:
                        one.room.release(self._pages_with(own))

    def _hold(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> bool:
        """Has the pages of a sequence stay at the instances on its way until its task ends; tells whether all
        of these have room for them. A sequence that is alone always finds room."""
        pages = self._pages_with(rows)
        if not all(self._make_room(one, pages) for one in way):
            return False
        for one in way:
            if one.room is not None:
                one.room.hold(pages)
        return True

    def _make_room(self, one: HostedBlock, pages: Sequence[int], redundant_alone: bool = False) -> bool:
        copies, now = self.fleet.instances(one.block), time.monotonic()
        over = () if self._paused is None else self._paused.known
        return self.sweeper.make_room(one, pages, copies, over, now, redundant_alone)

    def _pages_with(self, rows: SequenceRows) -> Sequence[int]:
        """The pages of a sequence behind some of its rows."""
        return rows.pages[: -(-(rows.context + rows.length) // self.settings.page_size)]

    def _legs(self, way: Sequence[HostedBlock]) -> list[Sequence[HostedBlock]]:
        """The way in parts whose workers reach each other: between two, rows come back here."""
        legs: list[list[HostedBlock]] = [[way[0]]]
        for before, one in itertools.pairwise(way):
            if self.fleet.is_avoided(before, one):
                legs.append([one])
            else:
                legs[-1].append(one)
        return list(legs)

    def _predicted(self, rows: Sequence[SequenceRows], way: Sequence[HostedBlock]) -> dict[int, str]:
        """The surrogates that predict outputs on the way of rows, by instance: beside those that complete
        their queues last."""
        if not (surrogates := rows[0].surrogates):
            return {}
        there = self.fleet.instances()
        profiles = {
            block: measured_profile([one for one in there if one.block == block])
            for block in {one.block for one in there}
        }
        seconds = {_place(one): profiles[one.block].seconds(one.rows) for one in there}
        slowest = bottlenecks(seconds, self.settings.speculated)
        names = {str(block): key for block, key in surrogates.items()}
        chain = [_place(one) for one in way]
        places = speculated_places(chain, slowest, names, approximates=True)
        return {way[place].number: surrogates[way[place].block] for place in places}

    def _pass(
        self,
        rows: Sequence[SequenceRows],
        leg: Sequence[HostedBlock],
        hidden: Tensor,
        predicted: Mapping[int, str],
    ) -> Generator[None, Outcome, Tensor]:
        """Takes rows through the instances of a leg, beside some of which surrogates predict."""
        segments = tuple(self._segment(one) for one in rows)
        steps = [[_step(one, own.states) for own in rows if one.loaded.state_nbytes] for one in leg]
        number = self._start(leg)
        hops = tuple(
            structs.replace(self._hop(one, segments, own), surrogate=predicted.get(one.number, ""))
            for one, own in zip(leg, steps, strict=True)
        )
        with suppress(Unreachable):  # told as an outcome
            leg[0].worker.send(PassRows(number, self.fleet.id, segments, hops), [hidden])
        outcome = yield
        if not isinstance(message := outcome.message, RowsPassed):
            raise self._failed(outcome, leg)
        (passed,) = outcome.tensors
        self.right += sum(message.verified)
        self.wrong += len(message.verified) - sum(message.verified)
        for one, seconds in zip(leg, message.seconds, strict=True):
            for own in rows:
                one.note(own.pages, own.context + own.length, self.settings.page_size)
            one.observe(len(passed), seconds)
        for one, taken in zip(leg, steps, strict=True):
            for own, step in zip(rows, taken, strict=bool(taken)):
                _note_state(one, step, (own.key, own.context + own.length))
        self.fleet.count(leg, passed.nbytes, message.seconds)
        return passed

    def _segment(self, rows: SequenceRows) -> RowSegment:
        pages = tuple(self._pages_with(rows))
        return RowSegment(rows.key, rows.length, rows.context, pages, rows.adapter, rows.goes_on)

    def _hop(self, one: HostedBlock, segments: Sequence[RowSegment], states: Sequence[StateStep] = ()) -> Hop:
        """A hop to an instance, which cleans those of the pages first in which nothing counts there. They are
        clean once a message has passed: another one on its way does not rely on it."""
        fresh = dict.fromkeys(page for own in segments for page in own.pages if page not in one.filled)
        places = () if one.room is None else tuple(one.places(own.pages) for own in segments)
        return Hop(one.worker.address, one.number, one.places([*fresh]), states=tuple(states), pages=places)

    # Pages

    def _bring(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> Steps:
        """Brings the pages of a sequence's context to the instances on its way, from the first block on.
        Raises _Again where a worker is lost meanwhile, and a worker's error."""
        size = self.settings.page_size
        for block, one in enumerate(way):
            if lacking := one.lacking(rows.pages, rows.context, size):
                yield from self._move(rows, way[: block + 1], lacking)

    def _bring_states(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> Steps:
        """As `_bring`, of a model with recurrent layers: pages and states are copied from an instance that
        has all of a block; blocks of which nobody has are computed again, with all before them."""
        lost = [n for n, one in enumerate(way) if not (self._has(rows, one) or self._holder(rows, one))]
        if lost:
            yield from self._replay(rows, way[: lost[-1] + 1])
        for one in way:
            if not self._has(rows, one):
                yield from self._fetch(rows, one)

    def _has(self, rows: SequenceRows, one: HostedBlock) -> bool:
        """Tells whether an instance has the pages and the state before rows."""
        name = rows.states.name
        is_there = name is None or not one.loaded.state_nbytes or one.states.find(name) is not None
        return is_there and not one.lacking(rows.pages, rows.context, self.settings.page_size)

    def _holder(self, rows: SequenceRows, one: HostedBlock) -> HostedBlock | None:
        """Another instance of the block that has all before the rows, and reaches this one."""
        others = (other for other in self.fleet.instances(one.block) if other is not one)
        return next((o for o in others if self._has(rows, o) and not self.fleet.is_avoided(o, one)), None)

    def _fetch(self, rows: SequenceRows, one: HostedBlock) -> Steps:
        """Copies the pages that an instance lacks, and the state. Raises _Again where nobody has them now."""
        if lacking := one.lacking(rows.pages, rows.context, self.settings.page_size):
            if self._source(rows, one, lacking) is None:
                raise _Again
            yield from self._move(rows, [one], lacking, MovingPages.COPY)
        if self._has(rows, one):
            return
        source, name = self._holder(rows, one), rows.states.name
        place = None if source is None or name is None else source.states.find(name)
        if source is None or name is None or place is None:
            raise _Again
        into = 2 * rows.states.line
        one.states.drop(into)
        number = self._start([source, one])
        moved, hop = MovedState(*name, place, into), Hop(one.worker.address, one.number)
        with suppress(Unreachable):
            source.worker.send(CopyPages(number, self.fleet.id, source.number, (), hop, moved))
        outcome = yield
        if not isinstance(outcome.message, RowsPassed):
            raise self._failed(outcome, [source, one])
        one.states.put(into, name)
        self.copied_states += 1

    def _replay(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> Steps:
        """Computes rows again from the newest state that all on the way have with the pages before it, or
        from the front. Raises _Again where a worker is lost meanwhile, and a worker's error."""
        size, name = self.settings.page_size, rows.states.name
        assert name is not None, "a state before the rows is lost"

        def has(one: HostedBlock, earlier: StateName) -> bool:
            is_there = not one.loaded.state_nbytes or one.states.find(earlier) is not None
            return is_there and not one.lacking(rows.pages, earlier[1], size)

        kept = [own for own in self.states.earlier(rows.key, name) if all(has(one, own) for one in way)]
        before = max(kept, key=lambda own: own[1], default=None)
        start = 0 if before is None else before[1]
        while start < rows.context:
            count = min(rows.context - start, _COMPUTED)
            states = StatePlan(rows.states.line, before)
            part = replace(rows, key=name[0], length=count, context=start, goes_on=False, states=states)
            hidden = rows.embedded(start, count)
            for leg in self._legs(way):
                hidden = yield from self._pass([part], leg, hidden, {})
            before, start = (name[0], start + count), start + count
            self.recomputed += count

    def _move_ahead(self, paused: PausedSequences) -> None:
        """Begins the moves of pages that are due, each beside the flights."""
        self._moves = [move for move in self._moves if not move.is_done]
        for one, target in paused.due(self.fleet.instances(), time.monotonic()):
            move = Flight((), torch.empty(0, 0), torch.empty(0, 0), [], frozenset(one.pages), tasks=1)
            self._moves.append(move)
            self._go_on(move, self._copy_ahead(one, target), None)

    def _copy_ahead(self, paused: SequencePages, target: HostedBlock) -> Steps:
        """Copies pages of a sequence that has ended to an instance. One that is lost is not tried again."""

        def embedded(start: int, count: int) -> Tensor:
            raise AssertionError("pages are copied alone")

        rows = SequenceRows(paused.key, 1, paused.tokens, paused.pages, "", False, embedded)
        lacking = target.lacking(rows.pages, rows.context, self.settings.page_size)
        if not lacking or self._source(rows, target, lacking) is None:
            return
        if self._make_room(target, rows.pages, redundant_alone=True):
            with suppress(_Again), holding(target, rows.pages):
                yield from self._move(rows, [target], lacking, MovingPages.COPY)
                self.moved += 1

    def _stop(self, move: Flight) -> None:
        """Ends a move once what it has begun is over."""
        begun = {number: task for number, (flight, task) in self._waiting.items() if flight is move}
        numbers = set(begun)
        while numbers:
            outcome = self._outcomes.get()
            if outcome.number in numbers:
                numbers.remove(outcome.number)
                del self._waiting[outcome.number]
            else:
                self._take(outcome)
        for task in begun.values():
            task.close()
        move.tasks = 0

    def _move(
        self,
        rows: SequenceRows,
        way: Sequence[HostedBlock],
        lacking: Sequence[int],
        moving: MovingPages | None = None,
    ) -> Steps:
        """Recomputes pages from the first that is lacking on, while they are copied from the last back."""
        one, size = way[-1], self.settings.page_size
        first = lacking[0] * size
        source = self._source(rows, one, lacking)
        nbytes = one.loaded.page_nbytes / size
        link = None if source is None else live_link(source.worker, one.worker, time.monotonic())
        rate, is_known = self._recompute_rate(one)
        move = PageMove(
            tokens=rows.context - first,
            token_nbytes=max(int(nbytes), 1),
            page=size,
            link=link,
            recompute_rate=rate,
        )
        moving = MovingPages.RECOMPUTE if source is None else moving or self.moving
        meeting = Meeting(move, max(_COPIED, size), moving, _COMPUTED if is_known else None)
        with holding(source, rows.pages[lacking[0] : -(-rows.context // size)]):
            yield from self._meet(rows, way, first, source, meeting)
        recomputed, copied = meeting.done
        self.recomputed, self.copied = self.recomputed + len(recomputed), self.copied + len(copied)
        if source is not None and link is not None and copied and nbytes:
            shown = ClusterLink(max(meeting.copy_rate * nbytes, 1.0), link.latency)
            source.worker.links[one.worker.address] = MeasuredLink(shown, time.monotonic())

    def _meet(
        self,
        rows: SequenceRows,
        way: Sequence[HostedBlock],
        first: int,
        source: HostedBlock | None,
        meeting: Meeting,
    ) -> Steps:
        """Brings the pages of a move, whose first token is `first`, until both sides meet."""
        one = way[-1]
        going: dict[int, tuple[range, float, bool]] = {}
        while not meeting.is_done:
            if (tokens := meeting.next_recomputed()) is not None:
                number = self._recompute(rows, way, range(first + tokens.start, first + tokens.stop))
                going[number] = tokens, time.monotonic(), False
            if source is not None and (tokens := meeting.next_copied()) is not None:
                number = self._copy(source, one, self._pages_of(rows, first, tokens))
                going[number] = tokens, time.monotonic(), True
            outcome = yield
            tokens, began, is_copy = going.pop(outcome.number)
            if not isinstance(message := outcome.message, RowsPassed):
                for other in going:  # late ones are nobody's
                    del self._waiting[other]
                    self.fleet.failed(other, None, way)
                raise self._failed(outcome, [source, one] if is_copy and source else way)
            seconds = max(outcome.at - began, 0.0)
            if is_copy:
                self._brought(rows, one, first, tokens)
                meeting.copied(seconds)
            else:
                for earlier, spent in zip(way, message.seconds, strict=True):
                    earlier.observe(len(tokens), spent)
                    self._brought(rows, earlier, first, tokens)
                meeting.recomputed(seconds)

    def _recompute_rate(self, one: HostedBlock) -> tuple[float, bool]:
        """Tokens a second that an instance computes again, and whether passes of many rows have shown that:
        its own, or else those of others of its block. What passes of few rows show is too little."""
        known = (one, *self.fleet.instances(one.block))
        shown = next((each.rate for each in known if max(each.seconds, default=0) >= _COPIED), 0.0)
        return shown or max(each.rate for each in known) or _RECOMPUTED, shown > 0.0

    def _source(self, rows: SequenceRows, one: HostedBlock, lacking: Sequence[int]) -> HostedBlock | None:
        """Another instance of the block that has all from the first page on that this one lacks, of several
        the one with the fastest link."""
        size, now = self.settings.page_size, time.monotonic()
        found = [
            other
            for other in self.fleet.instances(one.block)
            if other is not one
            and not self.fleet.is_avoided(other, one)
            and all(place < lacking[0] for place in other.lacking(rows.pages, rows.context, size))
        ]
        return max(found, key=lambda other: live_link(other.worker, one.worker, now).rate, default=None)

    def _pages_of(self, rows: SequenceRows, first: int, tokens: range) -> tuple[int, ...]:
        size = self.settings.page_size
        return tuple(rows.pages[(first + tokens.start) // size : -(-(first + tokens.stop) // size)])

    def _brought(self, rows: SequenceRows, one: HostedBlock, first: int, tokens: range) -> None:
        size = self.settings.page_size
        for place in range((first + tokens.start) // size, -(-(first + tokens.stop) // size)):
            there = min(size, first + tokens.stop - place * size)
            one.filled[rows.pages[place]] = max(one.filled.get(rows.pages[place], 0), there)

    def _recompute(self, rows: SequenceRows, way: Sequence[HostedBlock], tokens: range) -> int:
        number = self._start(way)
        pages = tuple(rows.pages[: -(-tokens.stop // self.settings.page_size)])
        segment = RowSegment(rows.key, len(tokens), tokens.start, pages, rows.adapter)
        hops = tuple(self._hop(one, [segment]) for one in way)
        hidden = rows.embedded(tokens.start, len(tokens))
        with suppress(Unreachable):
            way[0].worker.send(PassRows(number, self.fleet.id, (segment,), hops), [hidden])
        return number

    def _copy(self, source: HostedBlock, target: HostedBlock, pages: tuple[int, ...]) -> int:
        number = self._start([source, target])
        hop, places = Hop(target.worker.address, target.number), source.places(pages)
        into = None if target.room is None else target.places(pages)
        asked = CopyPages(number, self.fleet.id, source.number, places, hop, into=into)
        with suppress(Unreachable):
            source.worker.send(asked)
        return number


def _step(one: HostedBlock, plan: StatePlan) -> StateStep:
    """The places of a sequence's states at an instance in a pass, of which those that it writes count no
    longer. Raises _Again where the state before is not there."""
    before = -1 if plan.name is None else one.states.find(plan.name)
    if before is None:
        raise _Again
    after = 2 * plan.line + (before == 2 * plan.line)
    for written in (after, plan.kept):
        one.states.drop(written)
    return StateStep(before, 0 if plan.name is None else plan.name[0], after, plan.kept)


def _note_state(one: HostedBlock, step: StateStep, name: StateName) -> None:
    """Notes that rows have passed, whose states are there now."""
    for place in (step.after, *([step.kept] if step.kept >= 0 else [])):
        one.states.put(place, name)


def _place(one: HostedBlock) -> tuple[str, str]:
    """An instance as policies name it: its worker and its block."""
    return one.worker.address, str(one.block)


def _grouped(ways: Mapping[int, Sequence[HostedBlock]], pieces: int) -> list[list[int]]:
    """Places of rows that go the same way, in up to so many groups each: workers compute one while another is
    on its way."""
    same: dict[tuple[int, ...], list[int]] = {}
    for place, way in ways.items():
        same.setdefault(tuple(one.number for one in way), []).append(place)
    found = []
    for places in same.values():
        count = min(pieces, len(places))
        found += [places[piece::count] for piece in range(count)]
    return found
