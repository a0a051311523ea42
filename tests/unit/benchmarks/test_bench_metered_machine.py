"""A machine of predicted seconds in real time."""

import pytest

from coserve.core.plan import BasePlan, Passes
from coserve.core.request import SLO, Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings
from coserve.workload.requests import TimedJob, TimedRequest
from coserve_benchmarks.gpu_times import LAYERS, GpuTimes
from coserve_benchmarks.metered_machine import MeteredExecutor, MeteredMachine
from ticking import Clock, ticking

TIMES = GpuTimes()


def decoding(rows: int, cached: int = 512) -> BasePlan:
    asked = Request("r", (0,) * cached)
    return inference_plan([(Sequence(key, asked), cached - 1, 1) for key in range(1, rows + 1)])


def prompts(count: int, length: int) -> BasePlan:
    asked = Request("r", (0,) * length)
    return inference_plan([(Sequence(key, asked), 0, length) for key in range(1, count + 1)])


def forward(layers: int, rows: int = 64, slice_layers: int = 1) -> BasePlan:
    batch = MicroBatch(1, "job", "job@0", (rows,), layers)
    window = training_segment(batch, 0, rows, Direction.TRAIN_FORWARD, Span(0, layers))
    batches = announce_batches([batch])
    return BasePlan(training=(window,), micro_batches=batches, slice_layers=slice_layers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return ticking(monkeypatch)


def test_plans_begin_when_those_before_them_end(clock: Clock) -> None:
    """Plans that are launched in time follow each other without a break; for a late one the device waits."""
    executor = MeteredExecutor(lambda plan: 0.03)
    executor.run(forward(1))
    for plan in (forward(1), forward(1)):
        executor.launch(plan)
    executor.collect()
    executor.collect()
    assert clock.now == pytest.approx(0.09) and executor.idle == pytest.approx(0.0)
    clock.sleep(0.02)
    executor.run(forward(1))
    assert clock.now == pytest.approx(0.14) and executor.idle == pytest.approx(0.02)


def test_a_pause_stops_training_behind_the_slice_that_the_device_is_at(clock: Clock) -> None:
    executor = MeteredExecutor(lambda plan: 0.02 * sum(len(segment.span) for segment in plan.training))
    clock.due = (0.09, executor.pause_training)
    executor.launch(forward(20))
    result = executor.collect()
    assert result is not None and result.paused
    (ran,) = result.trained
    assert len(ran.span) == 5, "the 4 layers that had ended, and the one under way"
    assert clock.now == pytest.approx(0.1) and result.seconds == pytest.approx(0.1)


def test_an_arrival_that_was_announced_does_the_same(clock: Clock) -> None:
    settings = MachineSettings(jitter=Jitter(0.0, 0.0))
    machine = MeteredMachine("hybrid", TIMES, settings, plans_ahead=0)
    machine.start(TimedJob(0.0, "job", ((0,) * 1024,) * 8, 8, epochs=1000, rows=4096))
    machine.step()
    began = machine.clock()
    machine.step(lambda _: began + 0.02)
    assert machine.clock() - began < 0.2, "not the half second of a quantum"
    machine.ask(TimedRequest(0.0, (0,) * 32, 3, slo=SLO()), began + 0.02)
    tokens = 0
    while tokens < 3:
        tokens += sum(type(event).__name__ == "TokenEvent" for event in machine.step())


@pytest.mark.parametrize(
    ("rows", "milliseconds"), [(1, 6.56), (8, 6.77), (32, 7.52), (128, 11.0), (256, 17.0)]
)
def test_a_gpus_decode_steps_take_what_was_measured(rows: int, milliseconds: float) -> None:
    assert TIMES.predict(decoding(rows)) == pytest.approx(1e-3 * milliseconds)


def test_fewer_cached_tokens_take_less() -> None:
    assert TIMES.predict(decoding(64, 256)) < TIMES.predict(decoding(64))


@pytest.mark.parametrize(
    ("count", "length", "milliseconds"), [(1, 2048, 51.2), (8, 512, 99.3), (4, 2048, 198.0), (1, 8192, 260.0)]
)
def test_its_prompts_do(count: int, length: int, milliseconds: float) -> None:
    assert TIMES.predict(prompts(count, length)) == pytest.approx(1e-3 * milliseconds, rel=1e-3)


def test_it_trains_as_fast_as_was_measured() -> None:
    batch = MicroBatch(1, "job", "job@0", (1024,) * 4, LAYERS)
    forward = training_segment(batch, 0, 4096, Direction.TRAIN_FORWARD, Span(0, LAYERS))
    tail = training_segment(batch, 0, 4096, Direction.LOSS, Span(LAYERS, LAYERS + 1))
    back = training_segment(batch, 0, 4096, Direction.BACKWARD, Span(0, LAYERS))
    seconds = TIMES.predict(BasePlan(training=(forward, tail, back)))
    assert 4096 / (seconds + 1e-3) == pytest.approx(13_267, rel=1e-3), "half of an optimizer step's 2 ms"


def test_rows_apart_take_passes_of_their_own() -> None:
    """By graph for those that decode; a slice takes its layers' share of a pass."""
    mixed = inference_plan(
        [(Sequence(1, Request("r", (0,) * 512)), 511, 1), (Sequence(2, Request("r", (0,) * 128)), 0, 128)]
    )
    apart = BasePlan(inference=mixed.inference, passes=Passes(decodes_apart=True))
    assert TIMES.predict(apart) == pytest.approx(6.56e-3 + 8.0e-3)
    assert TIMES.predict(mixed) < TIMES.predict(apart)
    whole, half = (TIMES.predict(forward(layers, 2048)) for layers in (LAYERS, LAYERS // 2))
    assert half == pytest.approx(whole / 2)
