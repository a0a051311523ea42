"""Training in the bubbles of a pipeline: seconds in which a stage has no rows of answers."""

from dataclasses import dataclass, replace
from typing import Final

from coserve.core.request import SLO
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import RunFigures, figures_of
from coserve.workload.shapes import shape_named

LOAD: Final = SimulatedLoad(
    20.0, 4.0, slo=SLO(first_token=5.0, between_tokens=0.2), training=TrainingLoad(2, 1, 512)
)
_ALMOST_NONE: Final = 1e-3  # requests a second


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Training of one pipeline, tokens a second: `beside` answers, and `alone`; and the share of these
    answers that is `within` its bounds."""

    beside: float
    alone: float
    within: float

    @property
    def filled(self) -> float:
        """The share of training that is kept beside answers."""
        return self.beside / self.alone


def fleet_of_stages(stages: int = 2) -> FleetSettings:
    """A pipeline with 13B parameters, on so many stages of two A100 each."""
    return FleetSettings(shape_named("13b"), "a100-40", degree=2, stages=stages)


def measure_bubbles(fleet: FleetSettings, load: SimulatedLoad = LOAD, seed: int = 0) -> Bubbles:
    """Measures the training of one pipeline under a load and without it, in modelled seconds. Raises
    ConfigError."""
    beside, alone = _figures(fleet, load, seed), _figures(fleet, replace(load, rate=_ALMOST_NONE), seed)
    return Bubbles(beside.training, alone.training, beside.within)


def _figures(fleet: FleetSettings, load: SimulatedLoad, seed: int) -> RunFigures:
    return figures_of(Simulator(fleet, load).run(seed))
