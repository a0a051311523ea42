"""The seconds of plans on a machine, and what its scheduler knows of them when a load begins."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Final

from coserve.core.plan import BasePlan, OptimStep, WeightReads
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import ConfigError
from coserve.schedule.cost import CostModel, Costs
from coserve.schedule.features import Features
from coserve.schedule.reads import ReadCosts
from coserve.schedule.segments import inference_plan, training_segment
from coserve.simulate.aiconfigurator import PREFIX, measured_roofline
from coserve.simulate.counting import PassKind, PassWork, PlanCounter
from coserve.simulate.hardware import MeasuredTable, Roofline, Table, hardware_named
from coserve.simulate.pipelined import StageSeconds
from coserve.streamed.planner import Streaming, plan_residence, refuse_too_little

_NO_READS: Final = WeightReads()
# What a device is probed with, as an engine measures its own (`engine.calibrate`), but with larger steps:
# (sequences, cached tokens of each), (sequences, prompt tokens of each), (examples, tokens of each).
_DECODE: Final = ((1, 64), (8, 512), (32, 512), (128, 512), (128, 2048))
_PREFILL: Final = ((1, 64), (1, 512), (4, 512), (1, 2048), (8, 32))
_WINDOWS: Final = ((1, 32), (1, 256), (1, 512), (4, 512), (1, 2048))
_JOB: Final = "calibration"
_BACK: Final = (PassKind.LOSS, PassKind.BACKWARD, PassKind.UPDATE)
_GIGA: Final = 1e9
_SHORTEST, _LONGEST = 1e-8, 3600.0  # seconds of a step: a clock of days does not tell shorter ones apart
_BESIDE: Final = (PassKind.LOSS, PassKind.UPDATE)  # passes of no layer


class Times(ABC):
    """A machine's true seconds, without jitter."""

    layers: int
    host: float  # seconds of the host in each step
    known_host = 0.0  # those of them that a scheduler knows at its start

    @property
    @abstractmethod
    def read_costs(self) -> ReadCosts:
        """Costs of reading a streamed base; without layers where it stays in memory."""

    @abstractmethod
    def predict(self, plan: BasePlan) -> float:
        """Seconds that a plan takes."""

    @abstractmethod
    def computed(self, plan: BasePlan) -> float:
        """Seconds of these without waiting for weights."""

    def reads(self, plan: BasePlan, factor: float) -> WeightReads:
        """Reads of a streamed base by a plan that takes `factor` times the predicted seconds."""
        costs = self.read_costs
        if not costs.layers:
            return _NO_READS
        visits = Features.of(plan).visits(costs.layers)
        waited = max((self.predict(plan) - self.computed(plan)) * factor, 0.0)
        return WeightReads(int(visits * costs.nbytes), costs.seconds(visits) * factor, waited)

    def by_stage(self, plan: BasePlan) -> StageSeconds:
        """Seconds of a plan in each stage of a pipeline; a machine is a single stage."""
        return StageSeconds((self.predict(plan),), (0.0,))

    @abstractmethod
    def known(self) -> CostModel:
        """A fresh cost model that knows what an engine knows at its start."""


class WeightedTimes(Times):
    """Seconds by weights of the cost model's own features, which its scheduler knows.

    `streamed` are the bytes that a pass over all layers reads, and bytes a second; without them the base
    stays in memory.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        layers: int,
        streamed: tuple[int, float] | None = None,
        host: float = 0.0,
    ) -> None:
        self.layers, self.host = layers, host
        self._weights, self._streamed = weights, streamed
        self._truth, self._arithmetic = self.known(), CostModel(weights)

    def predict(self, plan: BasePlan) -> float:
        """See `Times`."""
        return self._truth.predict(plan)

    def computed(self, plan: BasePlan) -> float:
        """See `Times`."""
        return self._arithmetic.predict(plan)

    @property
    def read_costs(self) -> ReadCosts:
        """See `Times`."""
        return self._truth.reads

    def known(self) -> CostModel:
        """See `Times`."""
        model = CostModel(self._weights)
        if self._streamed is not None:
            model.reads.start(range(self.layers), *self._streamed)
        return model


class RooflineTimes(Times):
    """Seconds of counted work by a table of hardware. Its scheduler knows what it would have measured at its
    start: weights that are fitted to probes. `streaming` says which layers are read in every pass; None is
    that all stay in memory. A pipeline has several `stages`, and sends rows from one to the next over the
    link that a host's network is at, to its memory's."""

    def __init__(
        self, counter: PlanCounter, table: Roofline, streaming: Streaming | None = None, stages: int = 1
    ) -> None:
        self.layers, self.host = counter.shape.layers, table.host_seconds
        self.known_host = self.host
        self._stages = counter.stages(stages)
        self.streaming = streaming
        self._counter, self._table = counter, table

    def predict(self, plan: BasePlan) -> float:
        """See `Times`."""
        costs = self.read_costs
        if not costs.layers:
            return self.computed(plan)
        features = Features.of(plan)
        back = features.visits_back(costs.layers)
        there = features.visits(costs.layers) - back
        work = self._counter.count(plan)
        return beside_reads(self._table, self._counter, work, costs.seconds(there), costs.seconds(back))

    def computed(self, plan: BasePlan) -> float:
        """See `Times`."""
        if len(self._stages) > 1:
            return self.by_stage(plan).total
        counter = self._counter
        return self._table.seconds(counter.count(plan), counter.shape.dtype, counter.degree)

    def by_stage(self, plan: BasePlan) -> StageSeconds:
        """See `Times`."""
        dtype, degree = self._counter.shape.dtype, self._counter.degree
        forward, back = [], []
        for stage in self._stages:
            work = stage.count(plan)
            forward.append(self._table.seconds((one for one in work if one.kind not in _BACK), dtype, degree))
            back.append(self._table.seconds((one for one in work if one.kind in _BACK), dtype, degree))
        kept = sum(one.length for one in plan.training if one.direction is Direction.TRAIN_FORWARD)
        rows = kept + sum(one.length for one in plan.inference)
        returning = sum(one.length for one in plan.training if one.direction is Direction.BACKWARD)
        return StageSeconds(tuple(forward), tuple(back), self._sending(rows), self._sending(returning))

    def _sending(self, rows: int) -> float:
        """Seconds in which rows get to the next stage: each device has its part."""
        shape, table = self._counter.shape, self._table
        link = table.host_link_gbs * _GIGA * table.efficiency.bandwidth
        return rows * shape.hidden * shape.item_bytes / self._counter.degree / link

    @cached_property
    def read_costs(self) -> ReadCosts:
        """See `Times`."""
        return read_costs(self.streaming, self.layers)

    def known(self) -> CostModel:
        """See `Times`."""
        model = CostModel()
        model.recall(self._learned)
        model.reads = read_costs(self.streaming, self.layers)
        return model

    @cached_property
    def _learned(self) -> Costs:
        """Costs fitted to the probes, once for all engines."""
        model = CostModel()
        model.fit((plan, self.computed(plan)) for plan in probes(self.layers))
        return model.learned


def probes(layers: int) -> Iterator[BasePlan]:
    """Plans that a cost model is fitted to: decode, prefill, windows both ways, updates, and mixed steps."""
    keys = count(-1, -1)
    for sequences, tokens in _DECODE:
        yield _rows(keys, sequences, tokens, 1)
    for sequences, tokens in _PREFILL:
        yield _rows(keys, sequences, tokens, tokens)
        yield _rows(keys, sequences, tokens, tokens, "adapter@1")
    for examples, tokens in _WINDOWS:
        batch = MicroBatch(next(keys), _JOB, f"{_JOB}@0", (tokens,) * examples, layers)
        there = training_segment(batch, 0, batch.length, Direction.TRAIN_FORWARD, Span(0, layers))
        yield BasePlan(training=(there,))
        yield replace(_rows(keys, 1, 64, 1), training=(there,))
        yield BasePlan(training=(replace(there, direction=Direction.LOSS),))
        yield BasePlan(training=(replace(there, direction=Direction.BACKWARD),))
        half = replace(there, direction=Direction.BACKWARD, span=Span(layers // 2, layers))
        yield BasePlan(training=(half,))
    yield BasePlan(updates=(OptimStep(_JOB),))


def check_seconds(name: str, times: Times) -> None:
    """Raises ConfigError where a step takes no time by a table, or hours: a run would not come to an end."""
    rows, steps = _rows(count(-1, -1), 1, 64, 1), 0.0
    for plan in (rows, *(plan for plan in probes(times.layers) if plan.training or plan.updates)):
        seconds = times.predict(plan)
        if not seconds <= _LONGEST or (plan is rows and seconds < _SHORTEST):
            raise ConfigError(
                f"{name}: a step takes {seconds:g} s by this table; a simulation's take {_SHORTEST:g} to "
                f"{_LONGEST:g} s"
            )
        steps += seconds if plan is not rows else 0.0
    if steps < _SHORTEST:
        raise ConfigError(f"{name}: training takes {steps:g} s by this table, and would never end")


def _rows(
    keys: Iterator[int], sequences: int, tokens: int, rows: int, adapter: str | None = None
) -> BasePlan:
    """The last `rows` rows of so many sequences of `tokens` tokens each."""
    asked = Request("calibration", (0,) * tokens, adapter=adapter)
    return inference_plan((Sequence(next(keys), asked), tokens - rows, rows) for _ in range(sequences))


def table_named(hardware: str) -> Table:
    """The table called `hardware`: one of the package, a file, or one of `aiconfigurator-core` behind
    `aiconfigurator:`. Raises ConfigError."""
    return measured_roofline(hardware) if hardware.startswith(PREFIX) else hardware_named(hardware)


def times_on(
    hardware: str, counter: PlanCounter, base_memory: int | None = None, stages: int = 1
) -> tuple[Times, Roofline | MeasuredTable]:
    """The seconds of a shape on the hardware called `hardware`, and its table. Of the base at most
    `base_memory` bytes are in each device's memory; None is all. The counter's devices are those of each of
    a pipeline's `stages`. Raises ConfigError."""
    table = table_named(hardware)
    if isinstance(table, Roofline):
        if counter.shape.dtype not in table.peak_tflops:
            raise ConfigError(f"{table.name}: peak_tflops has no rate for {counter.shape.dtype}")
        if base_memory is not None and stages > 1:
            raise ConfigError("a base is streamed by one engine, and not by the stages of a pipeline")
        return RooflineTimes(counter, table, streaming_of(counter, table, base_memory), stages), table
    if base_memory is not None:
        raise ConfigError(f"the table {table.name!r} has no link that a base could be streamed over")
    devices, measured = counter.degree * stages, (table.shape, table.layers)
    if (counter.shape.name, counter.shape.layers) != measured or devices > 1:
        raise ConfigError(
            f"the table {table.name!r} was measured for one device and the shape {table.shape} of "
            f"{table.layers} layers; it says nothing of {devices} with {counter.shape.name} "
            f"({counter.shape.layers} layers)"
        )
    return WeightedTimes(table.weights, table.layers, host=table.host_seconds), table


def streaming_of(counter: PlanCounter, table: Roofline, base_memory: int | None) -> Streaming | None:
    """Way in which a device with `base_memory` bytes for the base reads the layers that do not stay over the
    link to its host; None where all stay. Raises ConfigError for fewer bytes than a base can be streamed
    in."""
    if base_memory is None:
        return None
    shape = counter.shape
    layer = shape.layer_weights // shape.layers * shape.item_bytes // counter.degree
    blocks = [layer] * shape.layers
    ends = int(counter.device_weight_bytes) - sum(blocks)
    refuse_too_little(blocks, ends, base_memory)
    plan = plan_residence(blocks, base_memory - ends)
    if not plan.read_nbytes:
        return None
    resident = ends + len(plan.resident) * layer + plan.buffers * plan.buffer_nbytes
    return Streaming(plan, resident, table.host_link_gbs * _GIGA * table.efficiency.bandwidth)


def read_costs(streaming: Streaming | None, layers: int) -> ReadCosts:
    """Costs of reading in each pass what does not stay, of a base of `layers` layers."""
    costs = ReadCosts()
    if streaming is not None:
        read = sorted({*range(layers)} - streaming.plan.resident)
        costs.start(read, streaming.plan.read_nbytes, streaming.rate)
    return costs


def beside_reads(
    table: Roofline, counter: PlanCounter, work: Iterable[PassWork], there: float, back: float
) -> float:
    """Seconds of passes beside which weights are read, `there` seconds on the way forward and `back` on the
    way back: each way takes the longer of reading and computing, as in `schedule.cost.CostModel`."""
    dtype, degree = counter.shape.dtype, counter.degree
    computed = dict.fromkeys(PassKind, 0.0)
    for one in work:
        computed[one.kind] += table.seconds([one], dtype, degree)
    forward = computed[PassKind.FORWARD] + computed[PassKind.HEAD]
    return (
        max(forward, there) + max(computed[PassKind.BACKWARD], back) + sum(computed[kind] for kind in _BESIDE)
    )
