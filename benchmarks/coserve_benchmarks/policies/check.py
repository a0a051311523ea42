"""Rounds in real time beside simulated ones of the same requests and jobs, at the machine's own costs."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from coserve.engine.engine import Engine
from coserve.workload.requests import Workload
from coserve_benchmarks.drive import serve
from coserve_benchmarks.groups import begin
from coserve_benchmarks.policies.cells import ALONE, CellRunner, SimulatedTestbed, cell
from coserve_benchmarks.policies.contest import Contest, Judge
from coserve_benchmarks.policies.fitted import RoundSettings
from coserve_benchmarks.policies.testbed import EngineTestbed

_POLICIES: Final = ("hybrid",)
_LOADS: Final = (0.25, 0.5)
_WARM: Final = 1.0  # seconds of training before the first round
_SET_BY_MACHINE: Final = ("layers", "max_positions", "interruptible")


def check(shape: str, requests: int) -> dict[str, Any]:
    """Poisson arrivals at two loads: cells of real rounds, and of simulated ones.

    The simulation has the engine's costs as they were before the rounds that train, and the seconds that the
    loop around its steps takes. Its deviations are the default ones.
    """
    bench = begin(shape, True, (), (), None, {})
    testbed = EngineTestbed(bench)
    loads: dict[str, Any] = {}
    for load in _LOADS:
        sizes = RoundSettings(1.0, bench.shape.vocabulary)
        runner = _Check(testbed, sizes, load, requests)
        runner.poisson()
        loads[f"{load:g}"] = runner.column
    said = (
        f"The shape {shape} on {bench.machine.cpu}, {bench.machine.threads} threads, Poisson arrivals; the "
        "same requests, jobs and bounds on predicted seconds, at the costs that the engine had measured "
        "before the rounds that train, and the seconds of the loop around its steps."
    )
    return {"said": said, "shape": shape, "machine": bench.machine.as_dict(), "loads": loads}


@dataclass(slots=True)
class _Check(CellRunner):
    """Both sides of each contest."""

    def contest(
        self,
        workload: Workload,
        policies: Sequence[str],
        judges: dict[str, Judge],
        bounds: dict[str, str],
    ) -> Contest:
        """The requests without jobs and under each policy, in real time and on predicted seconds."""
        assert isinstance(self.testbed, EngineTestbed)
        engine, judge = self.testbed.engine, next(iter(judges.values()))
        self.testbed.peak(workload, _WARM)  # what is made at first use, and costs of training
        weights = {**engine.scheduler.cost.first.weights}
        weights["step"] += _loop_seconds(engine, workload)
        config = asdict(engine.scheduler.config)
        settings = {name: config[name] for name in config if name not in (*_SET_BY_MACHINE, "row_buckets")}
        simulated = SimulatedTestbed(weights=weights, layers=engine.scheduler.config.layers, **settings)
        for side, testbed in (("real", self.testbed), ("simulated", simulated)):
            alone = testbed.run("hybrid", replace(workload, jobs=()))
            self.column[side] = {ALONE: cell(alone, alone, judge)}
            for policy in _POLICIES:
                self.column[side][policy] = cell(testbed.run(policy, workload), alone, judge)
        self.column |= {
            "rate": len(workload.requests) / workload.seconds,
            "bounds": next(iter(bounds.values())),
        }
        return Contest(workload, bounds, judges, 0.0)


def _loop_seconds(engine: Engine, workload: Workload) -> float:
    """Seconds that the loop around a step takes, without the executor's own: mean over some requests."""
    run, steps = engine.loop.executor.run, []

    def watched(plan: Any) -> Any:
        result = run(plan)
        steps.append(result.seconds)
        return result

    first = workload.requests[:8]
    burst = replace(workload, requests=tuple(replace(r, at=0.0) for r in first), jobs=(), seconds=1e-3)
    engine.loop.executor.run = watched  # type: ignore[method-assign]
    try:
        started = time.perf_counter()
        serve(engine, burst)
        return max(time.perf_counter() - started - sum(steps), 0.0) / max(len(steps), 1)
    finally:
        del engine.loop.executor.run
