"""Pipelines on modelled hardware: what each stage counts and holds, and fleets of them."""

import random
from dataclasses import fields, replace

import pytest

from coserve.core.plan import BasePlan, InferenceSegment, OptimStep, TrainingSegment
from coserve.core.request import SLO
from coserve.core.sequence import Direction, Span
from coserve.errors import ConfigError
from coserve.simulate.counting import PassWork, PlanCounter
from coserve.simulate.hardware import hardware_named
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import figures_of
from coserve.simulate.times import RooflineTimes
from coserve.workload.shapes import shape_named
from coserve_benchmarks.ranks.bubbles import LOAD as BUBBLES
from coserve_benchmarks.ranks.bubbles import fleet_of_stages, measure_bubbles

SHAPE = shape_named("13b")
LOAD = SimulatedLoad(4.0, 4.0, slo=SLO(first_token=5.0, between_tokens=0.2), training=TrainingLoad(2, 1, 512))
FLEET = FleetSettings(SHAPE, "a100-40", degree=2, stages=2)


def drawn(draw: random.Random) -> BasePlan:
    """A plan of answers and windows through some layers, or of an optimizer step."""
    answers = tuple(
        InferenceSegment(n, draw.randrange(50), rows, draw.randrange(50), 1)
        for n, rows in enumerate(draw.choices((1, 1, 7), k=draw.randrange(1, 5)))
    )
    windows = []
    for number, way in enumerate(draw.choices([*Direction][1:], k=draw.randrange(4))):
        first = draw.randrange(SHAPE.layers)
        span = Span(SHAPE.layers, SHAPE.layers + 1) if way.is_tail else Span(first, SHAPE.layers)
        windows.append(TrainingSegment(100 + number, "j", "j@0", 0, 64, 900, way, span, SHAPE.layers))
    return BasePlan(inference=answers, training=tuple(windows), updates=(OptimStep("j"),) * draw.randrange(2))


def total(work: list[PassWork]) -> dict[str, float]:
    numbers = [field.name for field in fields(PassWork) if field.name not in ("kind", "layers", "rows")]
    return {name: sum(getattr(one, name) for one in work) for name in numbers}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_count_together_what_the_whole_model_does(stages: int) -> None:
    draw, whole = random.Random(stages), PlanCounter(SHAPE, SHAPE.lora_weights(8), degree=2)
    parts = whole.stages(stages)
    assert [part.layers.first for part in parts[1:]] == [part.layers.last for part in parts[:-1]]
    assert sum(part.device_weight_bytes for part in parts) == pytest.approx(whole.device_weight_bytes)
    for _ in range(40):
        plan = drawn(draw)
        counted = [total(part.count(plan)) for part in parts]
        for name, expected in total(whole.count(plan)).items():
            assert sum(one[name] for one in counted) == pytest.approx(expected), name


def test_a_plan_has_its_seconds_by_stage_and_way() -> None:
    table = hardware_named("a100-40")
    counter = PlanCounter(SHAPE, SHAPE.lora_weights(8), degree=2)
    times = RooflineTimes(counter, table, stages=2)  # type: ignore[arg-type]
    alone = RooflineTimes(counter, table)  # type: ignore[arg-type]
    decode = BasePlan(inference=(InferenceSegment(0, 100, 1, 100, 1),))
    taken = times.by_stage(decode)
    assert not any(taken.back) and taken.forward[0] < taken.forward[1] < 1.2 * taken.forward[0]  # the head
    # 5,120 channels of a row in bfloat16, half on each device, over 80 % of 32 GB/s.
    assert taken.sending == pytest.approx(5120 * 2 / 2 / 25.6e9)
    assert times.predict(decode) == pytest.approx(alone.predict(decode) + taken.sending)
    window = TrainingSegment(1, "j", "j@0", 0, 64, 900, Direction.BACKWARD, Span(0, 40), 40)
    taken = times.by_stage(BasePlan(training=(window,)))
    assert not any(taken.forward) and taken.back[0] == pytest.approx(taken.back[1])
    assert alone.by_stage(decode).forward == (alone.predict(decode),)


def test_what_fits_is_what_the_fullest_stage_holds() -> None:
    tokens = Simulator(FLEET, LOAD).cache_tokens
    assert tokens > 1.5 * Simulator(replace(FLEET, stages=1), LOAD).cache_tokens
    with pytest.raises(ConfigError, match=r"layers 0 to 39 of 70b does not fit on 1 x NVIDIA A100.*takes 4"):
        Simulator(replace(FLEET, shape=shape_named("70b"), degree=1), LOAD)


def test_pipelines_answer_and_train() -> None:
    """A token takes its pass through all stages; training keeps bounds and counts whole rows."""
    quiet = figures_of(Simulator(FLEET, replace(LOAD, training=TrainingLoad())).run(0))
    # 26 GB of weights over two devices, at 80 % of 1.555 TB/s, and the host's millisecond.
    assert quiet.time_per_token_mean == pytest.approx(26e9 / 2 / (0.8 * 1.555e12) + 2e-3, rel=0.25)
    figures = figures_of(Simulator(FLEET, LOAD).run(0))
    assert figures.unanswered == 0 and figures.within > 0.9 and figures.training > 500
    assert figures == figures_of(Simulator(FLEET, LOAD).run(0)) != figures_of(Simulator(FLEET, LOAD).run(1))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stages": 0}, "not 1 of 2 in 0 stages"),
        ({"stages": 41}, "13b has 40 layers, which 41 stages cannot share"),
        ({"policy": "spatial"}, "beside answers, which a pipeline's stages cannot"),
        ({"base_memory": 10**10}, "not by the stages of a pipeline"),
        ({"hardware": "two-cores"}, "says nothing of 4 with 13b"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Simulator(replace(FLEET, **wrong), LOAD)  # type: ignore[arg-type]


def test_bubbles_of_two_stages_keep_most_of_the_training() -> None:
    """In modelled seconds, with all answers within their bounds; answers that leave less time leave less."""
    found = measure_bubbles(fleet_of_stages(2))
    assert found.within == 1.0 and 0.8 <= found.filled < 1.0
    assert measure_bubbles(fleet_of_stages(2), replace(BUBBLES, rate=12.0)).filled < found.filled - 0.05
