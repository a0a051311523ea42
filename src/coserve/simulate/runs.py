"""Runs of a simulation: a fleet on some hardware, a policy, a load, a seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
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
USED: Final = 0.9  # of a device's memory; the rest is for the runtime, kernels' workspaces and fragments
_GIGA: Final = 1e9
_TRAINED_BYTES: Final = 16  # of an adapter's weight in training: float32 weight, gradient and two moments
_WORKING: Final = 6  # copies of a window's rows in one layer, in channels of the hidden and the inner width


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


def cache_tokens_of(
    counter: PlanCounter, table: Roofline, training_rows: int, jobs: int, resident: int | None = None
) -> int:
    """Tokens whose keys and values fit on the devices of one engine or of one stage of it, beside the weights
    and `jobs` jobs with `training_rows` rows of activations each. Of a streamed base `resident` bytes are on
    each device. Raises ConfigError where none do."""
    shape, degree, layers = counter.shape, counter.degree, counter.layers
    memory = table.memory_nbytes * USED
    weights = counter.device_weight_bytes if resident is None else resident
    training = jobs * _job_bytes(counter, training_rows)
    left = memory - weights - training
    token = counter.cache_token_bytes * len(layers)
    tokens = int(left / token) // PAGE_SIZE * PAGE_SIZE if left > 0 else 0
    if tokens < PAGE_SIZE:
        beside = f" and training {training / _GIGA:.3g} GB" if jobs else ""
        least = _least_devices(counter, memory, training * degree)
        part = "" if counter.span is None else f"layers {layers.first} to {layers.last - 1} of "
        raise ConfigError(
            f"{part}{shape.name} does not fit on {degree} x {table.name}: its weights take "
            f"{weights / _GIGA:.3g} GB of each{beside}, and {USED:.0%} of the memory are "
            f"{memory / _GIGA:.3g} GB; it takes {least} of them or more (--degree)"
        )
    return tokens


def _job_bytes(counter: PlanCounter, rows: int) -> float:
    """Bytes of a job on one device: its adapter's state, the inputs of all layers, keys, values and their
    gradients, and the working set of one layer and of the loss."""
    shape, item = counter.shape, counter.shape.item_bytes
    layers = len(counter.layers)
    state = counter.adapter_weights * layers / shape.layers * _TRAINED_BYTES / counter.degree
    kept = rows * layers * (shape.hidden * item + 2 * counter.cache_token_bytes)
    working = rows * item * _WORKING * (shape.hidden + shape.intermediate / counter.degree)
    window = 128 if counter.span is None else 512  # of the loss, a quarter of a whole one but in a pipeline
    logits = min(rows, window) * shape.vocabulary * 4 / counter.degree
    return state + kept + working + logits


def _least_devices(counter: PlanCounter, memory: float, training: float) -> int:
    """The smallest power of two devices whose memory holds it all, with a page of keys and values."""
    whole = counter.device_weight_bytes * counter.degree + training
    degree, layers = 1, len(counter.layers)
    while (whole + counter.cache_token_bytes * counter.degree * layers * PAGE_SIZE) / degree > memory:
        degree *= 2
    return degree
