"""Cost of switching between answering and training (FineInfer, table 1)."""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, TypeVar

import numpy as np

from coserve.core.plan import StepPlan, StepResult
from coserve.schedule.policies import make_policy
from coserve.workload.requests import Workload, greedy
from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench, seconds_of_steps, start_job
from coserve_benchmarks.policies.testbed import EngineTestbed
from coserve_benchmarks.timing import OF_ROUNDS

_T = TypeVar("_T")
_PAIRS: Final = 12  # of requests, and of iterations, in one round
_Ran = tuple[bool, float, float]  # whether a step trained, and its beginning and end


def measure(bench: Bench, testbed: EngineTestbed, workload: Workload, rounds: int) -> None:
    """Measures two requests and two fine-tuning iterations in turn: the first of each two comes after a
    switch, the second, of the same work, after none.

    What the first takes longer, with the time before it, is the switch; neighbours of the same second are
    compared, so that a machine that drifts cancels out. There is no data movement of adapters, which are
    resident. The time between two steps of different kinds, beyond that between two of one kind, is
    initialisation and clean-up.
    """
    turns = _Turns(testbed, workload)
    ran: list[_Ran] = []
    found: list[float] = []
    for _ in range(rounds):
        gc.collect()
        for _ in range(_PAIRS):
            answered, trained = turns.watching(turns.pairs, ran)
            found.append((answered + trained) / 2)
    turns.end()
    seconds = median(found)
    told = (
        f"median of {len(found)} pairs: what a request (of 8 tokens) and an optimizer step take longer right "
        "after the other kind of work than right after their own, per switch; not clamped: below zero it is "
        "less than the pairs tell apart"
    )
    bench.results.row("switch.seconds", seconds, interval(np.median, found), told, OF_ROUNDS)
    parts = {
        "initialisation": _between(ran, into_training=False),
        "clean_up": _between(ran, into_training=True),
        "data_movement": seconds,
        "seconds": seconds,
    }
    bench.results.section("switch", parts)


class _Turns:
    """A job and requests, one piece of either at a time."""

    def __init__(self, testbed: EngineTestbed, workload: Workload) -> None:
        self._engine = testbed.engine
        self._prompt = workload.requests[0].prompt
        self._answering(False)
        self._job = start_job(self._engine, workload.jobs[0])
        seconds_of_steps(self._engine)

    def pairs(self) -> tuple[float, float]:
        """Seconds that an answer, and an iteration, took longer after a switch."""
        answers = [self._answer() for _ in range(2)]
        iterations = [self._iterate() for _ in range(2)]
        return answers[0] - answers[1], iterations[0] - iterations[1]

    def watching(self, work: Callable[[], _T], ran: list[_Ran]) -> _T:
        """Runs `work` and returns its result; every step that it runs is appended to `ran`."""
        executor = self._engine.loop.executor
        run = executor.run

        def watched(plan: StepPlan) -> StepResult:
            started = time.perf_counter()
            result = run(plan)
            ran.append((bool(plan.training or plan.updates), started, time.perf_counter()))
            return result

        executor.run = watched  # type: ignore[method-assign]
        try:
            return work()
        finally:
            del executor.run

    def end(self) -> None:
        self._job.cancel()
        self._engine.step()

    def _answer(self) -> float:
        started = time.perf_counter()
        self._answering(True)
        handle = self._engine.generate(self._prompt, sampling=greedy(8))
        while handle.sequence.finish_reason is None:
            self._engine.step()
        return time.perf_counter() - started

    def _iterate(self) -> float:
        started = time.perf_counter()
        self._answering(False)
        seconds_of_steps(self._engine)
        return time.perf_counter() - started

    def _answering(self, wanted: bool) -> None:
        self._engine.scheduler.policy = make_policy("temporal:1000000" if wanted else "postpone-all")


def _between(ran: Sequence[_Ran], into_training: bool) -> float:
    """Seconds between two steps of different kinds, beyond those between two of one kind; medians."""
    switches, others = [], []
    for (trained, _, ended), (trains, begun, _) in pairwise(ran):
        if trained == trains:
            others.append(begun - ended)
        elif trains == into_training:
            switches.append(begun - ended)
    return median(switches) - median(others)
