"""The cheapest fleet that holds bounds under a load: devices, policy and settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from coserve.errors import ConfigError
from coserve.simulate.loads import SimulatedLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import Cell, Progress, run_cell

DEGREES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The demands on a fleet: the share `within` of requests that keep all their bounds, and `training`
    tokens a second of fine-tuning, with at most `devices` devices. A device of a hardware costs its `prices`,
    or 1."""

    within: float = 0.99
    training: float = 0.0
    devices: int = 64
    prices: Mapping[str, float] = field(default_factory=dict)

    def price(self, hardware: str) -> float:
        """Price of one device."""
        return self.prices.get(hardware, 1.0)

    def is_met(self, cell: Cell) -> bool:
        """Tells whether a fleet holds it on average over its seeds."""
        return (cell.mean("within") or 0.0) >= self.within and (cell.mean("training") or 0.0) >= self.training

    def missed(self, cell: Cell) -> str:
        """The rates that a fleet holds instead."""
        within, training = cell.mean("within") or 0.0, cell.mean("training") or 0.0
        trained = f", and {training:,.0f} of {self.training:,.0f} tokens/s trained" if self.training else ""
        return (
            f"{cell.devices} x {cell.hardware} under {cell.policy} have {within:.1%} of the requests within "
            f"their bounds, not {self.within:.1%}{trained}"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """A fleet that holds what is wanted, with the fewest engines of its kind, and its price."""

    settings: FleetSettings
    price: float
    cell: Cell

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        settings = self.settings
        return {
            "hardware": settings.hardware,
            "engines": settings.engines,
            "degree": settings.degree,
            "stages": settings.stages,
            "devices": settings.devices,
            "policy": settings.policy,
            "scheduler": dict(settings.scheduler),
            "price": self.price,
            "figures": self.cell.as_dict(),
        }


def advise(
    settings: FleetSettings,
    load: SimulatedLoad,
    wanted: Wanted,
    policies: Sequence[str],
    hardware: Sequence[str],
    degrees: Sequence[int] = DEGREES,
    choices: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    progress: Progress = lambda name, share: None,
    miss: Callable[[Cell], object] = lambda cell: None,
) -> list[Advice]:
    """Fleets that hold what is wanted, the cheapest first; of equal price the one that trains most. `miss` is
    called with each that does not.

    Every policy, hardware, degree and combination of `choices` (fields of `SchedulerConfig`) is tried with as
    few engines as hold it, found by doubling and halving: more engines are taken to hold whatever fewer do.
    Those that cannot be cheaper than what was found are not tried. Raises ConfigError where no model fits.
    """
    found: list[Advice] = []
    refusals: list[str] = []
    for candidate in _candidates(settings, policies, hardware, degrees, choices or {}):
        price = wanted.price(candidate.hardware) * candidate.engine_devices
        best = min((advice.price for advice in found), default=float("inf"))
        most = wanted.devices // candidate.engine_devices
        if best < float("inf"):
            most = min(most, int(best / price))
        try:
            cell = _fewest(candidate, load, wanted, most, lambda one: run_cell(one, seeds, progress), miss)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        if cell is not None:
            engines, held = cell
            found.append(Advice(replace(candidate, engines=engines), price * engines, held))
    if not found and refusals:
        raise ConfigError(refusals[0])
    return sorted(found, key=lambda advice: (advice.price, -(advice.cell.mean("training") or 0.0)))


def _candidates(
    settings: FleetSettings,
    policies: Sequence[str],
    hardware: Sequence[str],
    degrees: Sequence[int],
    choices: Mapping[str, Sequence[Any]],
) -> Iterator[FleetSettings]:
    for device, degree, policy, *values in product(hardware, degrees, policies, *choices.values()):
        chosen = {**settings.scheduler, **dict(zip(choices, values, strict=True))}
        yield replace(settings, hardware=device, degree=degree, policy=policy, scheduler=chosen)


def _fewest(
    candidate: FleetSettings,
    load: SimulatedLoad,
    wanted: Wanted,
    most: int,
    run: Callable[[Simulator], Cell],
    miss: Callable[[Cell], object],
) -> tuple[int, Cell] | None:
    """The smallest number of engines that holds what is wanted, and its cell; None where `most` do not."""

    def held(engines: int) -> Cell | None:
        cell = run(Simulator(replace(candidate, engines=engines), load))
        if wanted.is_met(cell):
            return cell
        miss(cell)
        return None

    if most < 1:
        return None
    low, engines = 0, 1
    while (cell := held(engines)) is None:
        if engines == most:
            return None
        low, engines = engines, min(2 * engines, most)
    while engines - low > 1:
        middle = (low + engines) // 2
        if (fewer := held(middle)) is None:
            low = middle
        else:
            engines, cell = middle, fewer
    return engines, cell
