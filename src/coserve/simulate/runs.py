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
from coserve.simulate.machine import PAGE_SIZE, MachineSettings, SimulatedMachine
from coserve.simulate.times import RooflineTimes, check_seconds, times_on
from coserve.workload.shapes import ModelShape

PATIENCE: Final = 60.0  # seconds after a load in which answers may end
_MAX_RUNNING: Final = 256
_MOST_ENGINES: Final = 100_000  # some 50 KB each
_MOST_TOKENS: Final = 1 << 28  # whose pages are 16 million numbers
_QUANTUM: Final = 0.1  # seconds in all stages of training alone, which answers meet in each and nobody pauses


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """A fleet: `engines` independent engines behind a router, each a pipeline of `stages` stages (one: no
    pipeline) of `degree` devices that share a stage's layers.

    `scheduler` are further fields of `SchedulerConfig`; `cache_tokens` of None are as many as fit, `jitter`
    of None is the hardware's. Of the base at most `base_memory` bytes are in each device's memory, and the
    rest is streamed; None is all of it.
    """

    shape: ModelShape
    hardware: str
    policy: str = "hybrid"
    engines: int = 1
    degree: int = 1
    stages: int = 1
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
        return self.engines * self.engine_devices

    @property
    def engine_devices(self) -> int:
        """Devices of one engine."""
        return self.degree * self.stages


class Simulator:
    """Runs one fleet under loads. What is the same in all runs is made once."""

    def __init__(self, settings: FleetSettings, load: SimulatedLoad) -> None:
        """Raises ConfigError for settings that no fleet can have."""
        if min(settings.engines, settings.degree, settings.stages) < 1:
            raise ConfigError(
                f"a fleet has at least one engine of one device, not {settings.engines} of {settings.degree}"
                + (f" in {settings.stages} stages" if settings.stages != 1 else "")
            )
        if settings.engines > _MOST_ENGINES:
            raise ConfigError(f"a fleet has at most {_MOST_ENGINES:,} engines, not {settings.engines:,}")
        policy = make_policy(settings.policy)
        make_router(settings.router, settings.engines)
        shape = settings.shape
        if shape.heads % settings.degree:
            raise ConfigError(
                f"{shape.name} has {shape.heads} heads, which {settings.degree} devices cannot share"
            )
        if min(settings.rank, settings.max_running) < 1:
            raise ConfigError("adapters have a rank of at least 1, and engines run at least one sequence")
        if settings.cache_tokens is not None and not PAGE_SIZE <= settings.cache_tokens <= _MOST_TOKENS:
            raise ConfigError(
                f"an engine has keys and values of {PAGE_SIZE} to {_MOST_TOKENS:,} tokens, not "
                f"{settings.cache_tokens:,}"
            )
        if not load.trace and load.prompt + load.answer > shape.positions:
            raise ConfigError(
                f"prompts of {load.prompt:,} tokens and answers of {load.answer:,} are longer than the "
                f"{shape.positions:,} positions of {shape.name}"
            )
        if load.training.jobs and load.training.length > shape.positions:
            raise ConfigError(
                f"examples of {load.training.length:,} tokens are longer than the {shape.positions:,} "
                f"positions of {shape.name}"
            )
        if settings.stages > shape.layers:
            raise ConfigError(
                f"{shape.name} has {shape.layers} layers, which {settings.stages} stages cannot share"
            )
        if settings.stages > 1 and policy.shares:
            raise ConfigError(
                f"policy {settings.policy} trains beside answers, which a pipeline's stages cannot"
            )
        counter = PlanCounter(shape, shape.lora_weights(settings.rank), settings.degree)
        self.settings, self.load = settings, load
        self.times, self.table = times_on(settings.hardware, counter, settings.base_memory, settings.stages)
        check_seconds(self.table.name, self.times)
        self._machine = self._settings_of_machines(counter)

    def _settings_of_machines(self, counter: PlanCounter) -> MachineSettings:
        settings, load = self.settings, self.load
        training = load.training
        if settings.cache_tokens is not None:
            tokens = settings.cache_tokens
        elif isinstance(self.table, Roofline):
            streaming = self.times.streaming if isinstance(self.times, RooflineTimes) else None
            resident = None if streaming is None else streaming.resident_nbytes
            parts = counter.stages(settings.stages) if settings.stages > 1 else (counter,)
            tokens = min(
                cache_tokens_of(part, self.table, training.rows, training.jobs, resident) for part in parts
            )
            tokens = min(tokens, _MOST_TOKENS)
        else:
            tokens = self.table.cache_tokens
        scheduler = {
            "interruptible": settings.stages == 1,
            **({"quantum": _QUANTUM, "max_quantum": _QUANTUM} if settings.stages > 1 else {}),
            "max_running": settings.max_running,
            "prefix_sharing": load.shares_prefixes,
            **settings.scheduler,
        }
        return MachineSettings(
            tokens,
            counter.shape.positions,
            settings.jitter or self.table.jitter,
            stages=settings.stages,
            scheduler=scheduler,
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
        most_late: float = float("inf"),
    ) -> FleetResult:
        """One run of the load, or its beginning where more than `most_late` answers miss a bound. `progress`
        is called with the simulated seconds, `watch` with each engine and its number before it begins."""
        settings = self.settings
        machines = [self.machine(seed, number) for number in range(settings.engines)]
        for number, machine in enumerate(machines):
            watch(machine, number)
        fleet = Fleet(machines, make_router(settings.router, settings.engines), progress)
        load = self.load
        jobs = load.training.make(settings.engines)
        return fleet.run(load.requests(seed), jobs, load.seconds, PATIENCE, most_late)
