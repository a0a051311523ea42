"""Two processes on the same cores and the same weights: transformers serves in one, PEFT trains in the
other."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from coserve.simulate.replay import LoadResult
from coserve.workload.requests import Workload
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.policies.without.launch import Contestant, as_load, start_soon
from coserve_benchmarks.policies.without.messages import ProcessRole, Serving
from coserve_benchmarks.policies.without.trials import TrialResult, best, try_all

_NICE = 19  # the least that a process may ask for


@dataclass(frozen=True, slots=True)
class Split:
    """Threads of server and trainer, by how much the trainer steps back (`nice`), and how the server serves.

    `passive` threads sleep while they wait. `matched` adapters are in the base's dtype; None lets the trainer
    measure what is faster.
    """

    serve: int
    train: int
    nice: int = 0
    passive: bool = False
    serving: Serving = Serving.SDPA
    matched: bool | None = None

    def describe(self) -> str:
        nice = f", trainer nice {self.nice}" if self.nice else ""
        passive = ", threads that wait sleep" if self.passive else ""
        return f"{self.serve} + {self.train} threads{nice}{passive}, {self.serving}"


class TwoProcesses:
    """Both processes, through all their rounds. Use it in a `with`."""

    def __init__(self, shape: ModelShape, split: Split) -> None:
        self._split = split
        self._server = Contestant(shape, ProcessRole.SERVE, split.serve, passive=split.passive)
        self._trainer = Contestant(shape, ProcessRole.TRAIN, split.train, split.nice, split.passive)
        self.matched = split.matched  # as it is; measured in the first round if that was left open

    def __enter__(self) -> "TwoProcesses":
        with ExitStack() as stack:
            for process in (self._server, self._trainer):
                stack.enter_context(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, workload: Workload) -> LoadResult:
        """One round; training ends with the last answer, or with the workload's time if that is later."""
        self._server.prepare(workload, self._split.serving)
        self.matched = self._trainer.prepare(workload, self._split.serving, self.matched)
        started = start_soon()
        for process in (self._server, self._trainer):
            process.begin(started)
        served = self._server.outcome(workload.seconds)
        time.sleep(max(0.0, started + workload.seconds - time.monotonic()))
        self._trainer.stop()
        return as_load(workload, started, [served, self._trainer.outcome()])


def two_processes(shape: ModelShape, workload: Workload, split: Split) -> LoadResult:
    """One round of processes of its own."""
    with TwoProcesses(shape, split) as contestant:
        return contestant.run(workload)


def splits(threads: int) -> list[Split]:
    """Settings to try on `threads` cores: shares that add up, and more threads than cores, each with and
    without a niced trainer."""
    half = max(1, threads // 2)
    shared = [Split(serve, max(1, threads - serve)) for serve in sorted({1, half, max(1, threads - 1)})]
    pairs = sorted({(1, threads), (half, threads), (threads, half), (threads, threads)})
    crowded = [Split(serve, train, passive=True) for serve, train in pairs]
    both = [*shared, *crowded] if threads > 1 else shared
    return [replace(split, nice=nice) for split in both for nice in (0, _NICE)]


def try_splits(shape: ModelShape, workload: Workload, threads: int) -> dict[Split, TrialResult]:
    """All splits that are tried, the whole workload for each: of threads first, and then how to serve with
    those that train most."""
    matched: bool | None = None

    def run(split: Split) -> LoadResult:
        nonlocal matched
        with TwoProcesses(shape, replace(split, matched=matched)) as contestant:
            load = contestant.run(workload)
        matched = contestant.matched
        return load

    tried = try_all(splits(threads), run)
    chosen = best(tried)
    others = [replace(chosen, serving=serving) for serving in Serving if serving is not chosen.serving]
    tried |= try_all(others, run)
    return {replace(split, matched=matched): found for split, found in tried.items()}
