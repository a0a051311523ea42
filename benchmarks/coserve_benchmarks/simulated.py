"""Machines of the benches on predicted seconds (`coserve.simulate`), by weights of the cost model's
features."""

from collections.abc import Mapping
from typing import Any, Final

from coserve.simulate.hardware import MeasuredTable, hardware_named
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.times import WeightedTimes
from coserve_benchmarks.ours import CACHE_TOKENS

_TABLE: Final = hardware_named("two-cores")
assert isinstance(_TABLE, MeasuredTable), "a table of weights"
TWO_CORES: Final[Mapping[str, float]] = _TABLE.weights


def weighted_machine(
    policy: str,
    weights: Mapping[str, float] = TWO_CORES,
    layers: int = 16,
    jitter: Jitter = Jitter(),
    seed: int = 0,
    host: float = 0.0,
    known: int = 32,
    streamed: tuple[int, float] | None = None,
    **scheduler: Any,
) -> SimulatedMachine:
    """A machine whose true seconds per unit of `CostModel`'s features are `weights`, which its scheduler
    knows but for `jitter`; see `WeightedTimes` and `MachineSettings`."""
    settings = MachineSettings(CACHE_TOKENS, jitter=jitter, known=known, scheduler=scheduler)
    return SimulatedMachine(policy, WeightedTimes(weights, layers, streamed, host), settings, seed)
