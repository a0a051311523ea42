"""The seconds of plans on a machine, and what its scheduler knows of them when a load begins."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Final

from coserve.core.plan import OptimStep, Plan, WeightReads
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import ConfigError
from coserve.schedule.cost import CostModel, Costs, Features
from coserve.schedule.segments import inference_plan, training_segment
from coserve.simulate.counting import PlanCounter
from coserve.simulate.hardware import MeasuredTable, Roofline, hardware_named

_NO_READS: Final = WeightReads()
# What a device is probed with, as an engine measures its own (`engine.calibrate`), but with larger steps:
# (sequences, cached tokens of each), (sequences, prompt tokens of each), (examples, tokens of each).
_DECODE: Final = ((1, 64), (8, 512), (32, 512), (128, 512), (128, 2048))
_PREFILL: Final = ((1, 64), (1, 512), (4, 512), (1, 2048), (8, 32))
_WINDOWS: Final = ((1, 32), (1, 256), (1, 512), (4, 512), (1, 2048))
_JOB: Final = "calibration"


class Times(ABC):
    """A machine's true seconds, without jitter."""

    layers: int
    host: float  # seconds of the host in each step

    @abstractmethod
    def predict(self, plan: Plan) -> float:
        """Seconds that a plan takes."""

    def reads(self, plan: Plan, factor: float) -> WeightReads:
        """What a plan that takes `factor` times those seconds reads of a streamed base."""
        return _NO_READS

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

    def predict(self, plan: Plan) -> float:
        """See `Times`."""
        return self._truth.predict(plan)

    def reads(self, plan: Plan, factor: float) -> WeightReads:
        """See `Times`."""
        reads = self._truth.reads
        if not reads.layers:
            return _NO_READS
        visits = Features.of(plan).visits(reads.layers)
        waited = max((self._truth.predict(plan) - self._arithmetic.predict(plan)) * factor, 0.0)
        return WeightReads(int(visits * reads.nbytes), reads.seconds(visits) * factor, waited)

    def known(self) -> CostModel:
        """See `Times`."""
        model = CostModel(self._weights)
        if self._streamed is not None:
            model.reads.start(range(self.layers), *self._streamed)
        return model


class RooflineTimes(Times):
    """Seconds of counted work by a table of hardware. Its scheduler knows what it would have measured at its
    start: weights that are fitted to probes."""

    def __init__(self, counter: PlanCounter, table: Roofline) -> None:
        self.layers, self.host = counter.shape.layers, table.host_seconds
        self._counter, self._table = counter, table

    def predict(self, plan: Plan) -> float:
        """See `Times`."""
        counter = self._counter
        return self._table.seconds(counter.count(plan), counter.shape.dtype, counter.degree)

    def known(self) -> CostModel:
        """See `Times`."""
        model = CostModel()
        model.recall(self._learned)
        model.host = self.host
        return model

    @cached_property
    def _learned(self) -> Costs:
        """What the probes teach; once for all engines."""
        model = CostModel()
        model.fit((plan, self.predict(plan)) for plan in probes(self.layers))
        return model.learned


def probes(layers: int) -> Iterator[Plan]:
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
        yield Plan(training=(there,))
        yield replace(_rows(keys, 1, 64, 1), training=(there,))
        yield Plan(training=(replace(there, direction=Direction.LOSS),))
        yield Plan(training=(replace(there, direction=Direction.BACKWARD),))
        half = replace(there, direction=Direction.BACKWARD, span=Span(layers // 2, layers))
        yield Plan(training=(half,))
    yield Plan(updates=(OptimStep(_JOB),))


def _rows(keys: Iterator[int], sequences: int, tokens: int, rows: int, adapter: str | None = None) -> Plan:
    """The last `rows` rows of so many sequences of `tokens` tokens each."""
    asked = Request("calibration", (0,) * tokens, adapter=adapter)
    return inference_plan((Sequence(next(keys), asked), tokens - rows, rows) for _ in range(sequences))


def times_on(hardware: str, counter: PlanCounter) -> tuple[Times, Roofline | MeasuredTable]:
    """The seconds of a shape on the hardware called `hardware`, and its table. Raises ConfigError."""
    table = hardware_named(hardware)
    if isinstance(table, Roofline):
        if counter.shape.dtype not in table.peak_tflops:
            raise ConfigError(f"{table.name}: peak_tflops has no rate for {counter.shape.dtype}")
        return RooflineTimes(counter, table), table
    if (counter.shape.name, counter.shape.layers) != (table.shape, table.layers) or counter.degree > 1:
        raise ConfigError(
            f"the table {table.name!r} was measured for one device and the shape {table.shape} of "
            f"{table.layers} layers; it says nothing of {counter.degree} with {counter.shape.name} "
            f"({counter.shape.layers} layers)"
        )
    return WeightedTimes(table.weights, table.layers, host=table.host_seconds), table
