"""Runs of a simulation: a fleet on some hardware, a policy, a load, a seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
from coserve.simulate.capacity import cache_tokens_of
from coserve.simulate.counting import PlanCounter
from coserve.simulate.fleet import Fleet, FleetResult, make_router
from coserve.simulate.hardware import Roofline
from coserve.simulate.jitter import Jitter
from coserve.simulate.loads import SimulatedLoad
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.times import RooflineTimes, times_on
from coserve.workload.shapes import ModelShape

PATIENCE: Final = 60.0  # seconds after a load in which answers may end
_MAX_RUNNING: Final = 256


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """A fleet: `engines` independent engines of `degree` devices each, behind a router. `scheduler` are
    further fields of `SchedulerConfig`; `cache_tokens` of None are as many as fit, `jitter` of None is the
    hardware's. Of the base at most `base_memory` bytes are in each device's memory, and the rest is streamed;
    None is all of it."""

    shape: ModelShape
    hardware: str
    policy: str = "hybrid"
    engines: int = 1
    degree: int = 1
    router: str = "least-loaded"
    rank: int = 16
    max_running: int = _MAX_RUNNING
    cache_tokens: int | None = None
    jitter: Jitter | None = None
    base_memory: int | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of all engines."""
        return self.engines * self.degree


class Simulator:
    """Runs one fleet under loads. What is the same in all runs is made once."""

    def __init__(self, settings: FleetSettings, load: SimulatedLoad) -> None:
        """Raises ConfigError for settings that no fleet can have."""
        if settings.engines < 1 or settings.degree < 1:
            raise ConfigError(
                f"a fleet has at least one engine of one device, not {settings.engines} of {settings.degree}"
            )
        make_policy(settings.policy)
        make_router(settings.router, settings.engines)
        shape = settings.shape
        if shape.heads % settings.degree:
            raise ConfigError(
                f"{shape.name} has {shape.heads} heads, which {settings.degree} devices cannot share"
            )
        counter = PlanCounter(shape, shape.lora_weights(settings.rank), settings.degree)
        self.settings, self.load = settings, load
        self.times, self.table = times_on(settings.hardware, counter, settings.base_memory)
        self._machine = self._settings_of_machines(counter)

    def _settings_of_machines(self, counter: PlanCounter) -> MachineSettings:
        settings, load = self.settings, self.load
        training = load.training
        if settings.cache_tokens is not None:
            tokens = settings.cache_tokens
        elif isinstance(self.table, Roofline):
            streaming = self.times.streaming if isinstance(self.times, RooflineTimes) else None
            resident = None if streaming is None else streaming.resident_nbytes
            tokens = cache_tokens_of(counter, self.table, training.rows, training.jobs, resident)
        else:
            tokens = self.table.cache_tokens
        scheduler = {
            "interruptible": True,
            "max_running": settings.max_running,
            "prefix_sharing": load.shares_prefixes,
            **settings.scheduler,
        }
        return MachineSettings(
            tokens, counter.shape.positions, settings.jitter or self.table.jitter, scheduler=scheduler
        )

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit in one engine."""
        return self._machine.cache_tokens

    def machine(self, seed: int, number: int = 0) -> SimulatedMachine:
        """One engine of the fleet."""
        return SimulatedMachine(self.settings.policy, self.times, self._machine, seed * 1_000_003 + number)

    def run(
        self,
        seed: int = 0,
        progress: Callable[[float], object] = lambda now: None,
        watch: Callable[[SimulatedMachine, int], object] = lambda machine, number: None,
    ) -> FleetResult:
        """One run of the load. `progress` is called with the simulated seconds, `watch` with each engine and
        its number before it begins."""
        settings = self.settings
        machines = [self.machine(seed, number) for number in range(settings.engines)]
        for number, machine in enumerate(machines):
            watch(machine, number)
        fleet = Fleet(machines, make_router(settings.router, settings.engines), progress)
        load = self.load
        return fleet.run(load.requests(seed), load.training.make(settings.engines), load.seconds, PATIENCE)
