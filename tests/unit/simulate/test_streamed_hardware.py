"""A base larger than a device's memory: each way takes the longer of reading layers and computing."""

from dataclasses import replace

import pytest

from coserve.core.plan import BasePlan
from coserve.errors import ConfigError
from coserve.simulate.counting import PassKind, PlanCounter
from coserve.simulate.hardware import Roofline, hardware_named
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import figures_of
from coserve.simulate.times import RooflineTimes, probes, streaming_of
from coserve.workload.shapes import shape_named

SHAPE = shape_named("13b").in_dtype("float16")
COUNTER = PlanCounter(SHAPE, SHAPE.lora_weights(8))
LAYER = SHAPE.layer_weights // SHAPE.layers * 2  # bytes
ENDS = SHAPE.parameters * 2 - SHAPE.layers * LAYER
RATE = 0.8 * 32e9  # bytes a second, of the link to the host
FLEET = FleetSettings(SHAPE, "rtx-3090", base_memory=ENDS + 12 * LAYER)
LOAD = SimulatedLoad(40.0, 0.1, prompt=64, answer=8)


def card() -> Roofline:
    table = hardware_named("rtx-3090")
    assert isinstance(table, Roofline)
    return table


def test_what_does_not_stay_is_read_in_each_pass() -> None:
    """Twelve layers' bytes are ten that stay and two buffers: 30 of 40 layers are read."""
    found = streaming_of(COUNTER, card(), ENDS + 12 * LAYER)
    assert found is not None
    assert len(found.plan.resident) == 10 and found.plan.read_nbytes == 30 * LAYER
    assert found.seconds == pytest.approx(30 * LAYER / RATE)
    assert found.resident_nbytes == ENDS + 12 * LAYER
    assert streaming_of(COUNTER, card(), ENDS + 40 * LAYER) is None  # all stay
    assert streaming_of(COUNTER, card(), None) is None


def test_each_way_takes_the_longer_of_reading_and_computing() -> None:
    times = RooflineTimes(COUNTER, card(), streaming_of(COUNTER, card(), ENDS + 12 * LAYER))
    resident = RooflineTimes(COUNTER, card())
    reading = 30 * LAYER / RATE
    seen = set()
    for plan in probes(SHAPE.layers):
        work = COUNTER.count(plan)
        computed = {kind: card().seconds([w for w in work if w.kind is kind], "float16") for kind in PassKind}
        there = computed[PassKind.FORWARD] + computed[PassKind.HEAD]
        back = computed[PassKind.BACKWARD]
        beside = computed[PassKind.LOSS] + computed[PassKind.UPDATE]
        # A window back through half of the layers reads those of its half that do not stay.
        part = sum(len(w.span) for w in plan.training) / SHAPE.layers if back else 1.0
        expected = max(there, reading if there else 0.0) + max(back, part * reading if back else 0.0) + beside
        assert times.predict(plan) == pytest.approx(expected, rel=0.02)
        assert times.computed(plan) == resident.predict(plan) == pytest.approx(there + back + beside)
        reads = times.reads(plan, 2.0)
        assert reads.waited == pytest.approx(2 * (times.predict(plan) - times.computed(plan)))
        seen.add((bool(there), bool(back), reads.waited > 0))
    assert len(seen) >= 3
    assert resident.reads(BasePlan(), 1.0).nbytes == 0


def test_the_scheduler_knows_how_long_a_pass_reads() -> None:
    times = RooflineTimes(COUNTER, card(), streaming_of(COUNTER, card(), ENDS + 12 * LAYER))
    assert times.known().pass_seconds == pytest.approx(30 * LAYER / RATE)
    assert times.known().free_rows > 100


def test_a_streamed_model_runs_where_a_resident_one_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="13b does not fit on 1 x NVIDIA GeForce RTX 3090"):
        Simulator(replace(FLEET, base_memory=None), LOAD)
    simulator = Simulator(FLEET, LOAD)
    alone = figures_of(simulator.run(0))
    assert alone.unanswered == 0 and alone.requests > 1
    assert alone.time_per_token_mean == pytest.approx(30 * LAYER / RATE, rel=0.1)
    training = TrainingLoad(1, 1, 256)
    beside = figures_of(Simulator(FLEET, replace(LOAD, training=training)).run(0))
    assert beside.training > 0  # in passes whose weights are read anyway, or between answers


def test_too_little_memory_and_hardware_without_a_link_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"are too few for this base.* at least"):
        Simulator(replace(FLEET, base_memory=ENDS), LOAD)
    own = replace(FLEET, shape=shape_named("255m"), hardware="two-cores")
    with pytest.raises(ConfigError, match="no link that a base could be streamed over"):
        Simulator(own, LOAD)
