"""Row `scaling.two_over_one`: what two servers behind a router do over what one does, on modelled seconds."""

from typing import Final

from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.shapes import shape_named
from coserve_benchmarks.ours import Bench

_SHAPE, _HARDWARE = "8b", "h200"
_RATE: Final = 240.0  # requests a second: more than two servers answer
_SECONDS: Final = 20.0
_QUICK_SECONDS: Final = 5.0


def run(bench: Bench) -> None:
    """Answered and trained tokens within the same seconds, of one server and of two, with more requests than
    either bears and a job on each. The scheduler is the real one."""
    seconds = _QUICK_SECONDS if bench.results.header["quick"] else _SECONDS
    load = SimulatedLoad(seconds, _RATE, prompt=256, answer=64, training=TrainingLoad(jobs=1))
    found = {}
    for engines in (1, 2):
        fleet = FleetSettings(shape_named(_SHAPE), _HARDWARE, engines=engines)
        result = Simulator(fleet, load).run(bench.settings.seed)
        found[engines] = result.tokens / seconds
        bench.results.figure(f"scaling.{engines}.answered", found[engines], "tokens/s")
        bench.results.figure(f"scaling.{engines}.trained", result.trained / seconds, "tokens/s")
    note = f"answered tokens of {_SHAPE} on {_HARDWARE}, modelled"
    bench.results.row("scaling.two_over_one", found[2] / found[1], note=note)
