"""Cost of switching between answering and training (FineInfer, table 1)."""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

import numpy as np

from coserve.core.plan import Plan, StepResult
from coserve.schedule.policies import make_policy
from coserve.workload.requests import Workload
from coserve_benchmarks.ours import Bench, greedy, seconds_of_steps, start_job
from coserve_benchmarks.policies.testbed import EngineTestbed
from coserve_benchmarks.timing import interval, timed

_TURNS: Final = 6  # requests and iterations in one round
_MORE: Final = 2 * _TURNS - 2  # switches by turns beyond those of two blocks; both begin after training
_Ran = tuple[bool, float, float]  # whether a step trained, and its beginning and end


def measure(bench: Bench, testbed: EngineTestbed, workload: Workload, rounds: int) -> None:
    """Measures requests and fine-tuning iterations in alternation against the same ones in two blocks.

    The difference is the cost of switches; there is no data movement, as adapters are resident. The time
    between two steps of different kinds, beyond that between two of one kind, is initialisation and clean-up.
    """
    turns = _Turns(testbed, workload)
    by_turns, in_blocks = timed(turns.by_turns), timed(turns.in_blocks)
    found: list[float] = []
    ran: list[_Ran] = []
    for _ in range(rounds):
        gc.collect()
        with_switches = turns.watching(by_turns, ran)
        found.append((with_switches - in_blocks()) / _MORE)
    turns.end()
    seconds = median(found)
    told = (
        f"median of {rounds} rounds: what {2 * _TURNS} pieces of work take longer by turns than in blocks, "
        f"over the {_MORE} switches that turns have more; below zero it is less than the rounds tell apart"
    )
    bench.results.row("switch.seconds", seconds, interval(np.median, found), told)
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

    def by_turns(self) -> None:
        for _ in range(_TURNS):
            self._answer()
            self._iterate()

    def in_blocks(self) -> None:
        for _ in range(_TURNS):
            self._answer()
        for _ in range(_TURNS):
            self._iterate()

    def watching(self, work: Callable[[], float], ran: list[_Ran]) -> float:
        """Runs `work` and returns its result; every step that it runs is appended to `ran`."""
        executor = self._engine.executor
        run = executor.run

        def watched(plan: Plan) -> StepResult:
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

    def _answer(self) -> None:
        self._answering(True)
        handle = self._engine.generate(self._prompt, sampling=greedy(8))
        while handle.sequence.finish_reason is None:
            self._engine.step()

    def _iterate(self) -> None:
        self._answering(False)
        seconds_of_steps(self._engine)

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
