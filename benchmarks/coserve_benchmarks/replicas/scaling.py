"""Row `scaling.two_over_one`: what two servers behind a router do over what one does, on modelled seconds."""

from collections import defaultdict
from statistics import median
from typing import Final

from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.shapes import shape_named
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.timing import LEAST_AND_MOST

_SHAPE, _HARDWARE = "8b", "h200"
_RATE: Final = 240.0  # requests a second: more than two servers answer
_SECONDS: Final = 20.0
_QUICK_SECONDS: Final = 5.0
_ROUNDS: Final = 3


def run(bench: Bench) -> None:
    """Answered and trained tokens within the same seconds, of one server and of two, with more requests than
    either bears and a job on each. The scheduler is the real one."""
    seconds = _QUICK_SECONDS if bench.results.header["quick"] else _SECONDS
    load = SimulatedLoad(seconds, _RATE, prompt=256, answer=64, training=TrainingLoad(jobs=1))
    answered, trained = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for number in range(1 if bench.results.header["quick"] else _ROUNDS):
        for engines in (1, 2):
            fleet = FleetSettings(shape_named(_SHAPE), _HARDWARE, engines=engines)
            result = Simulator(fleet, load).run(bench.settings.seed + number)
            answered[engines].append(result.tokens / seconds)
            trained[engines].append(result.trained / seconds)
    for engines in (1, 2):
        for what, rates in (("answered", answered[engines]), ("trained", trained[engines])):
            spread = min(rates), max(rates)
            bench.results.figure(f"scaling.{engines}.{what}", median(rates), "tokens/s", spread)
    ratios = [two / one for one, two in zip(answered[1], answered[2], strict=True)]
    note = f"answered tokens of {_SHAPE} on {_HARDWARE}, modelled; arrivals of {len(ratios)} seeds"
    spread = min(ratios), max(ratios)
    bench.results.row("scaling.two_over_one", median(ratios), spread, note, LEAST_AND_MOST)
