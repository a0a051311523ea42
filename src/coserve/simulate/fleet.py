"""A fleet of independent machines behind a router, all on one virtual clock."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final

from coserve.core.events import Event, TokenEvent, TrainingProgress
from coserve.core.request import SLO
from coserve.core.sequence import Sequence as Running
from coserve.errors import ConfigError, RequestError
from coserve.simulate.machine import SimulatedMachine
from coserve.simulate.replay import next_pressing, tokens_trained
from coserve.workload.requests import TimedJob, TimedRequest

# Seconds before it arrives that a request is routed: a step must know of an arrival that stops its training.
# So the router learns of answers' ends this much late, and of requests at once.
AHEAD: Final = 1.0
_NAP: Final = 1e-3  # seconds between two looks at a policy that waits


@dataclass(slots=True)
class Answered:
    """Times of a request, seconds: its arrival, its first and newest token, the longest gap between two."""

    arrival: float
    slo: SLO
    first: float | None = None
    newest: float = 0.0
    tokens: int = 0
    longest: float = 0.0
    deferred: float = 0.0  # by training
    is_done: bool = False
    machine: int = 0

    @property
    def first_token(self) -> float:
        """Seconds to the first token; infinite where none came."""
        return float("inf") if self.first is None else self.first - self.arrival

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds between two tokens; None of fewer than two."""
        return (
            None if self.tokens < 2 or self.first is None else (self.newest - self.first) / (self.tokens - 1)
        )

    @property
    def is_within(self) -> bool:
        """Tells whether the request kept all of its bounds; without a whole answer it kept none."""
        slo = self.slo
        pairs = (
            (slo.first_token, self.first_token),
            (slo.between_tokens, self.longest),
            (slo.end_to_end, self.newest - self.arrival),
            (slo.deferral, self.deferred),
        )
        return self.is_done and all(bound is None or taken <= bound for bound, taken in pairs)

    def note(self, now: float) -> None:
        """Counts a token."""
        if self.first is None:
            self.first = now
        else:
            self.longest = max(self.longest, now - self.newest)
        self.newest = now
        self.tokens += 1


class Router(ABC):
    """Chooses a machine for each request."""

    @abstractmethod
    def choose(self) -> int:
        """The machine of the next request."""

    def ended(self, machine: int) -> None:  # noqa: B027 (nothing to note is a choice, too)
        """Notes the end of an answer."""


class RoundRobin(Router):
    """One machine after the other."""

    def __init__(self, machines: int) -> None:
        self._machines, self._next = machines, -1

    def choose(self) -> int:
        """See `Router`."""
        self._next = (self._next + 1) % self._machines
        return self._next


class LeastLoaded(Router):
    """The machine with the fewest open requests; of several the one that was chosen first."""

    def __init__(self, machines: int) -> None:
        self._open = [0] * machines
        self._heap = [(0, machine) for machine in range(machines)]
        heapify(self._heap)

    def choose(self) -> int:
        """See `Router`. Takes O(log n) on average: counts that have changed since are dropped as they
        come."""
        while True:
            count, machine = heappop(self._heap)
            if count == self._open[machine]:
                break
        self._open[machine] += 1
        heappush(self._heap, (count + 1, machine))
        return machine

    def ended(self, machine: int) -> None:
        """See `Router`."""
        self._open[machine] -= 1
        heappush(self._heap, (self._open[machine], machine))


ROUTERS: Final[dict[str, Callable[[int], Router]]] = {"round-robin": RoundRobin, "least-loaded": LeastLoaded}


def make_router(name: str, machines: int) -> Router:
    """The router called `name`. Raises ConfigError for any other."""
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}; there are {', '.join(ROUTERS)}")
    return ROUTERS[name](machines)


@dataclass(slots=True)
class FleetResult:
    """The results of a fleet in `seconds`, and until its last answer.

    `trained` are fine-tuning tokens within these seconds; `refused` says why requests could never be served;
    `late` counts answers that are complete and have missed a bound. `steps` and `events` are those of all
    schedulers.
    """

    seconds: float
    answers: list[Answered] = field(default_factory=list)
    trained: float = 0.0
    tokens: int = 0  # answered within these seconds
    refused: list[str] = field(default_factory=list)
    steps: int = 0
    events: int = 0
    ended: float = 0.0
    late: int = 0


class Fleet:
    """Machines with a router before them.

    `progress` is called with the simulated seconds, some times in each of them.
    """

    def __init__(
        self,
        machines: Sequence[SimulatedMachine],
        router: Router,
        progress: Callable[[float], object] = lambda now: None,
    ) -> None:
        self._nodes = [_Node(number, machine) for number, machine in enumerate(machines)]
        self._router, self._progress = router, progress
        self._events: list[tuple[float, int]] = []  # (time of its next step, node), one for each that has any

    def run(
        self,
        requests: Iterable[TimedRequest],
        jobs: Sequence[TimedJob],
        seconds: float,
        patience: float,
        most_late: float = float("inf"),
    ) -> FleetResult:
        """Replays requests, in order of their arrival. Jobs go to the machines in turn.

        Training ends after `seconds`; answers that are not complete `patience` seconds later are given up,
        and so are all once more than `most_late` have missed a bound.
        """
        found = FleetResult(seconds)
        for number, job in enumerate(jobs):
            node = self._nodes[number % len(self._nodes)]
            node.jobs.append(job)
        for node in self._nodes:
            node.jobs = deque(sorted(node.jobs, key=lambda job: job.at))
            self._queue(node)
        coming = _Coming(requests)
        while True:
            at = self._events[0][0] if self._events else coming.next_at
            if at == float("inf") or at > seconds + patience or found.late > most_late:
                break
            while coming.next_at <= at + AHEAD:
                self._route(coming.take())
            if not self._events or self._events[0][0] != at:
                continue  # whoever was routed comes first
            node = self._nodes[heappop(self._events)[1]]
            node.is_queued = False
            self._progress(at)
            for machine in node.advance(found):
                self._router.ended(machine)
            self._queue(node)
        found.ended = max((node.machine.clock() for node in self._nodes), default=0.0)
        found.answers.sort(key=lambda answer: answer.arrival)
        return found

    def _route(self, request: TimedRequest) -> None:
        node = self._nodes[self._router.choose()]
        node.line.append(request)
        self._queue(node)

    def _queue(self, node: "_Node") -> None:
        """Has a node take its next step, once; one that has nothing to do is queued again when it has."""
        if not node.is_queued and (at := node.next_at) < float("inf"):
            heappush(self._events, (at, node.number))
            node.is_queued = True


class _Coming:
    """Requests that have not been routed."""

    def __init__(self, requests: Iterable[TimedRequest]) -> None:
        self._requests: Iterator[TimedRequest] = iter(requests)
        self._next = next(self._requests, None)

    @property
    def next_at(self) -> float:
        return float("inf") if self._next is None else self._next.at

    def take(self) -> TimedRequest:
        taken = self._next
        assert taken is not None, "`next_at` is finite"
        self._next = next(self._requests, None)
        assert self._next is None or self._next.at >= taken.at, "requests come in order"
        return taken


class _Node:
    """A machine of the fleet, with the requests on their way to it."""

    def __init__(self, number: int, machine: SimulatedMachine) -> None:
        self.number, self.machine = number, machine
        self.line: deque[TimedRequest] = deque()
        self.jobs: deque[TimedJob] = deque()
        self.is_queued = False
        self._open: dict[int, tuple[Answered, Running]] = {}
        self._cancel: list[Callable[[], None]] = []

    @property
    def next_at(self) -> float:
        """Time of the next step; infinite where there is nothing to do."""
        clock = self.machine.clock()
        if self.machine.scheduler.has_work:
            return clock
        coming = [line[0].at for line in (self.line, self.jobs) if line]
        return max(min(coming), clock) if coming else float("inf")

    def advance(self, found: FleetResult) -> Iterator[int]:
        """One step; yields its own number for each answer that has ended."""
        machine = self.machine
        if not machine.scheduler.has_work:
            machine.wait(max(self.next_at - machine.clock(), 0.0))
        now = machine.clock()
        self._take_in(now, found)
        if now >= found.seconds and self._cancel:
            for cancel in self._cancel:
                cancel()
            self._cancel.clear()
        if not machine.scheduler.has_work:
            return
        events = machine.step(partial(next_pressing, self.line))
        found.steps += 1
        found.events += len(events)
        if not events and machine.clock() == now:  # a policy waits for something: so does the clock
            machine.wait(_NAP)
        yield from self._note(events, found)

    def _take_in(self, now: float, found: FleetResult) -> None:
        while self.jobs and self.jobs[0].at <= now:
            job = self.jobs.popleft()
            if now < found.seconds:
                self._cancel.append(self.machine.start(job))
        while self.line and self.line[0].at <= now:
            request = self.line.popleft()
            answer = Answered(request.at, request.slo, machine=self.number)
            found.answers.append(answer)
            try:
                sequence = self.machine.ask(request, request.at)
            except RequestError as error:
                found.refused.append(str(error))
            else:
                self._open[sequence.key] = answer, sequence

    def _note(self, events: Sequence[Event], found: FleetResult) -> Iterator[int]:
        now = self.machine.clock()
        is_early = now <= found.seconds
        trains = False
        for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                answer, sequence = self._open[event.key]
                answer.note(now)
                found.tokens += is_early
                if event.finish_reason is not None:
                    answer.deferred, answer.is_done = sequence.deferred, True
                    found.late += not answer.is_within
                    del self._open[event.key]
                    yield self.number
            elif isinstance(event, TrainingProgress):
                trains = True
        if trains and is_early:
            found.trained += tokens_trained(events)
