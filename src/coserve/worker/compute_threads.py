"""The number of threads that compute: of this process, and of each step."""

import resource
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

import torch

from coserve.core.control_group import usable_processors

_FIRST: Final = 3  # steps with one number of threads before another is tried
_TRIAL: Final = 3  # steps of a trial
_AGAIN: Final = 64  # steps after a trial without a gain, unless steps take twice as long as then
_REGRET: Final = 50.0  # a number that lost a second is not tried for so many: 2 % at most for each
_GAIN: Final = 0.97  # a number of threads is better if its steps take at most so much of the others' time
_SURPRISE: Final = 2.0
_HOPELESS: Final = 3.0  # a trial ends with a step that takes so many times the usual
# In each second of computing: an idle machine takes the core from a thread 1 to 18 times, and other processes
# that compute on the same two cores do so 185 to 434 times, however few of the seconds they leave.
_PREEMPTED: Final = 50.0
_LOOK: Final = 0.3  # seconds of steps between two looks at that


def set_threads(count: int = 0) -> None:
    """Has torch compute with `count` threads; 0: with its default (`OMP_NUM_THREADS`, or one for each core),
    or with as many as the process has processors where these are fewer. A container's quota is no affinity,
    which is all that OpenMP looks at."""
    torch.set_num_threads(count or min(torch.get_num_threads(), usable_processors()))


@dataclass(slots=True)
class _Kind:
    """Steps of one kind: the number of threads they have, and the trial of another number."""

    threads: int
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds of the newest steps
    level: float = inf  # what was usual at the last trial
    trial: int | None = None
    tried: list[float] = field(default_factory=list)
    is_settled: bool = False  # whether no other number was better at the last trial
    steps: int = 0  # since the last trial
    clock: float = 0.0  # seconds of all steps
    not_before: dict[int, float] = field(default_factory=dict)  # clock's time of each number's next trial

    @property
    def is_due(self) -> bool:
        """Tells whether another number of threads may be tried now. What trials told before steps became
        twice as slow is forgotten."""
        if len(self.usual) < _FIRST:
            return False
        if self.steps >= _FIRST and median(self.usual) > _SURPRISE * self.level:
            self.not_before.clear()
            return True
        return self.steps >= (_AGAIN if self.is_settled else _FIRST)

    def note(self, threads: int, seconds: float) -> None:
        """Notes a step. The last one of a trial decides."""
        self.clock += seconds
        if threads == self.threads:
            self.usual.append(seconds)
            self.steps += 1
        elif threads == self.trial:
            self.tried.append(seconds)
            usual = median(self.usual)
            if len(self.tried) < _TRIAL and seconds <= _HOPELESS * usual:
                return
            is_better = median(self.tried) <= _GAIN * usual
            worse = self.threads if is_better else threads
            lost = abs(sum(self.tried) - len(self.tried) * usual)
            self.not_before[worse] = self.clock + _REGRET * lost
            if is_better:
                self.threads, self.usual = threads, deque(self.tried, self.usual.maxlen)
            self.trial, self.steps, self.is_settled, self.level = None, 0, not is_better, median(self.usual)
            self.tried.clear()


class ComputeThreads:
    """Chooses the number of threads of each step by the seconds that steps of its kind took.

    Threads of OpenMP wait for each other after each product and keep their cores meanwhile. Where something
    else needs the cores, the thread that all wait for is the one without a core: beside two busy processes on
    two cores a step takes up to a hundred times as long with two threads as with one (`docs/LOG.md`, "Threads
    that spin"). Fewer threads are tried where they may help, which is where the system takes cores from this
    process, or where a streamed base is read beside the step; more threads are tried from time to time.
    Trials cost at most 4 % of the time. On an idle machine there are none, and steps have all threads.
    """

    def __init__(self, most: int) -> None:
        """`most` is the number of threads that a step has at most. One fewer, a half, a quarter and so on
        may be chosen."""
        halves = (most >> shift for shift in range(1, most.bit_length()))
        self._counts = sorted({most, max(1, most - 1), *halves})
        self._kinds: dict[Hashable, _Kind] = {}
        self._newest = most  # the number that a kind's first step has
        self._switches, self._expected, self._seconds = 0, 0.0, 0.0  # since the last look
        self.is_preempted = False  # whether other processes took cores from the latest steps

    @contextmanager
    def step(self, kind: Hashable, is_reading: bool = False) -> Iterator[None]:
        """Context of a step of this kind, which computes with the chosen number of torch's threads.
        `is_reading` says that a thread of this process reads weights beside it."""
        most, threads = self._counts[-1], self.choose(kind, is_reading)
        (switches, computed), began = _usage(), time.perf_counter()
        if threads != most:
            torch.set_num_threads(threads)
        try:
            yield
            seconds = time.perf_counter() - began
            self.observe(kind, threads, seconds)
            switches_now, computed_now = _usage()
            self._look(switches_now - switches, computed_now - computed, seconds)
        finally:
            if threads != most:
                torch.set_num_threads(most)

    def choose(self, kind: Hashable, is_reading: bool = False) -> int:
        """The number of threads for the next step of this kind."""
        if len(self._counts) == 1:
            return self._counts[0]
        own = self._kinds.setdefault(kind, _Kind(self._newest))
        if own.trial is None and own.is_due:
            own.trial = self._other(own, is_reading or self.is_preempted)
        return own.threads if own.trial is None else own.trial

    def observe(self, kind: Hashable, threads: int, seconds: float) -> None:
        """Notes that a step of this kind took so many seconds with so many threads."""
        if (own := self._kinds.get(kind)) is not None:
            own.note(threads, seconds)
            self._newest = own.threads

    def _other(self, own: _Kind, may_be_fewer: bool) -> int | None:
        """The number to try, next to the present one: the one that is longest due."""
        place = self._counts.index(own.threads)
        fewer = self._counts[max(place - 1, 0) : place] if may_be_fewer else []
        due = [
            (not_before, threads)
            for threads in (*fewer, *self._counts[place + 1 : place + 2])
            if (not_before := own.not_before.get(threads, 0.0)) <= own.clock
        ]
        return min(due)[1] if due else None

    def _look(self, switches: int, computed: float, seconds: float) -> None:
        """Notes how often the system took a core in a step of so many seconds, in which all threads together
        computed for `computed` seconds."""
        self._switches += switches
        self._expected += _PREEMPTED * computed
        self._seconds += seconds
        if self._seconds >= _LOOK:
            self.is_preempted = self._switches > self._expected
            self._switches, self._expected, self._seconds = 0, 0.0, 0.0


def _usage() -> tuple[int, float]:
    """Counts the times that the system took a core from a thread of this process that wanted to go on, and
    the seconds that all of its threads have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nivcsw, used.ru_utime + used.ru_stime
