"""The most requests a second under which a fleet holds its bounds, and what it trains beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from coserve.simulate.advise import Wanted
from coserve.simulate.loads import SimulatedLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import Cell, Progress, run_cell

SHARES: Final = (0.25, 0.5, 0.75)  # of the highest rate, at which figures are told beside those at that rate
CLOSE: Final = 1.1  # times the rate that is found: so much is not held
_FEWEST: Final = 10.0  # requests of a run that tell anything
_AWAY: Final = 12  # steps of `CLOSE` that a fleet's rate is at most away from that of as many single engines
Try = Callable[[float], Cell | None]  # the cell at a rate, or None where the bounds are not held


@dataclass(frozen=True, slots=True)
class Held:
    """A fleet's figures at shares of the highest rate that it holds, the last ones at that rate."""

    settings: FleetSettings
    cells: tuple[Cell, ...]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return _rate(self.cells[-1])

    def missed(self, wanted: Wanted) -> list[Cell]:
        """Cells of lower rates that do not hold what is wanted: with fewer requests there is more training
        beside each, and bounds are then missed by its mispredictions."""
        return [cell for cell in self.cells if not wanted.is_met(cell)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the cells."""
        most = self.cells[-1]
        return {
            "policy": self.settings.policy,
            "hardware": self.settings.hardware,
            "devices": self.settings.devices,
            "rate": self.rate,
            "within": most.mean("within"),
            "training": most.mean("training"),
        }


def hold(
    settings: FleetSettings,
    load: SimulatedLoad,
    wanted: Wanted,
    seeds: Sequence[int] = (0,),
    progress: Progress = lambda name, share: None,
) -> Held | None:
    """Finds the highest rate, to a tenth, at which a fleet holds what is wanted; None where it does not hold
    the lowest that a run of these seconds tells anything of. Raises ConfigError where the model does not fit.

    A single engine's rate is found first, as its runs are quick; the fleet's is near so many times it. As
    much fine-tuning is wanted of each engine as of the fleet, divided by their number.
    """

    def held(rate: float, engines: int = settings.engines) -> Cell | None:
        asked = replace(wanted, training=wanted.training * engines / settings.engines)
        simulator = Simulator(replace(settings, engines=engines), load.at_rate(rate))
        # With more that are late in one run the mean over all cannot be met.
        most_late = (1 - wanted.within) * len(seeds) * (rate * load.seconds + 1)
        cell = run_cell(simulator, seeds, progress, most_late)
        return cell if asked.is_met(cell) else None

    best = _bisect(lambda rate: held(rate, 1), _FEWEST / load.seconds)
    if best is not None and settings.engines > 1:
        best = _walk(held, _rate(best) * settings.engines)
    if best is None:
        return None
    lower = (Simulator(settings, load.at_rate(share * _rate(best))) for share in SHARES)
    return Held(settings, (*(run_cell(simulator, seeds, progress) for simulator in lower), best))


def _bisect(held: Try, least: float) -> Cell | None:
    """The cell of the highest rate that is held, by doubling from `least` on."""
    low, best = least, held(least)
    if best is None:
        return None
    high = 2 * low
    while (cell := held(high)) is not None:
        low, best, high = high, cell, 2 * high
    while high > CLOSE * low:
        middle = (low * high) ** 0.5
        if (cell := held(middle)) is None:
            high = middle
        else:
            low, best = middle, cell
    return best


def _walk(held: Try, rate: float) -> Cell | None:
    """The cell of the highest rate that is held, from one that is near it, in steps of a tenth."""
    best = held(rate)
    for _ in range(_AWAY):
        rate = rate / CLOSE if best is None else rate * CLOSE
        cell = held(rate)
        if best is not None and cell is None:
            return best
        if best is None and cell is not None:
            return cell
        best = cell
    return best


def _rate(cell: Cell) -> float:
    assert cell.rate is not None, "a rate was asked for"
    return cell.rate
