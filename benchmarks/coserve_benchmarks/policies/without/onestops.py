"""One process that stops serving to train: PEFT takes a whole mini-batch whenever no request is there.

Serving and training have a copy of the weights each, so that neither pays for the other's wrappers and modes:
that costs memory, and no time.
"""

from dataclasses import dataclass, replace
from types import TracebackType

from coserve.simulate.replay import LoadResult
from coserve.workload.requests import Workload
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.policies.without.launch import Contestant, as_load, start_soon
from coserve_benchmarks.policies.without.messages import ProcessRole, Serving
from coserve_benchmarks.policies.without.trials import TrialResult, beginning, best, try_all


@dataclass(frozen=True, slots=True)
class Turns:
    """Its threads and how it serves. `matched` adapters are in the base's dtype; None lets it measure what is
    faster."""

    threads: int
    serving: Serving = Serving.STATIC
    matched: bool | None = None

    def describe(self) -> str:
        return f"{self.threads} threads, {self.serving}"


class OneProcess:
    """The process, through all its rounds. Use it in a `with`."""

    def __init__(self, shape: ModelShape, turns: Turns) -> None:
        self._turns = turns
        self._process = Contestant(shape, ProcessRole.BOTH, turns.threads)
        self.matched = turns.matched  # as it is; measured in the first round if that was left open

    def __enter__(self) -> "OneProcess":
        self._process.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def run(self, workload: Workload, serving: Serving | None = None) -> LoadResult:
        """One round; `serving` is another way than the process was made for."""
        self.matched = self._process.prepare(workload, serving or self._turns.serving, self.matched)
        started = start_soon()
        self._process.begin(started)
        return as_load(workload, started, [self._process.outcome(workload.seconds)])


def one_process(shape: ModelShape, workload: Workload, turns: Turns) -> LoadResult:
    """One round of a process of its own."""
    with OneProcess(shape, turns) as contestant:
        return contestant.run(workload)


def best_turns(
    shape: ModelShape, workload: Workload, threads: int, seconds: float
) -> tuple[Turns, dict[str, TrialResult]]:
    """The best way to serve on the beginning of a workload, `seconds` for each, and all that were tried."""
    part = beginning(workload, seconds)
    with OneProcess(shape, Turns(threads)) as contestant:
        tried = try_all(
            [Turns(threads, way) for way in Serving], lambda one: contestant.run(part, one.serving)
        )
    figures = {turns.describe(): found for turns, found in tried.items()}
    return replace(best(tried), matched=contestant.matched), figures
