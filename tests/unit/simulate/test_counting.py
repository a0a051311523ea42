"""Counts of plans, against a count linear by linear and layer by layer."""

import random
from collections import defaultdict
from dataclasses import fields, replace
from itertools import product

import pytest

from coserve.core.plan import (
    BasePlan,
    InferenceSegment,
    OptimStep,
    Passes,
    Prefix,
    TrainingSegment,
)
from coserve.core.sequence import Direction, Span
from coserve.schedule.features import Features
from coserve.simulate.counting import PassKind, PassWork, PlanCounter
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.floors import decode_bytes, train_flops

SHAPE = ModelShape("s", hidden=8, layers=6, intermediate=12, heads=4, groups=2, vocabulary=10, positions=64)
RANK = 3
ADAPTER = SHAPE.lora_weights(RANK)


def linears(shape: ModelShape) -> list[tuple[int, int]]:
    """(in, out) of the linears of one layer."""
    kv = shape.hidden // shape.heads * shape.groups
    hidden, inner = shape.hidden, shape.intermediate
    return [*[(hidden, hidden), (hidden, kv)] * 2, *[(hidden, inner)] * 2, (inner, hidden)]


def window(job: str, direction: Direction, first: int, last: int, rows: int, key: int = 0) -> TrainingSegment:
    return TrainingSegment(
        key, job, f"{job}@0", 0, rows, rows * 5, direction, Span(first, last), SHAPE.layers
    )


def total(works: list[PassWork], *kinds: PassKind) -> dict[str, float]:
    numbers = [field.name for field in fields(PassWork) if field.name not in ("kind", "layers", "rows")]
    return {name: sum(getattr(one, name) for one in works if one.kind in kinds) for name in numbers}


def naive(plan: BasePlan) -> dict[str, float]:
    """Forward and back, one (layer, row) after the other."""
    found: dict[str, float] = defaultdict(float)
    size = sum(a * b for a, b in linears(SHAPE))
    lora = sum(RANK * (a + b) for a, b in linears(SHAPE))
    kv_bytes = 2 * SHAPE.groups * SHAPE.hidden // SHAPE.heads * 2
    for layer in range(SHAPE.layers):
        adapters, visited = set(), False
        for one in plan.inference:
            for row in range(one.length):
                visited = True
                found["flops"] += 2 * size
                found["attention_flops"] += 2 * 2 * SHAPE.hidden * (one.context + row + 1)
                found["adapter_flops"] += 2 * lora if one.adapter else 0
            found["cache_bytes"] += (one.context + one.length) * kv_bytes
            adapters |= {one.adapter} - {None}
        for one in plan.training:
            if one.direction is Direction.TRAIN_FORWARD and one.span.first <= layer < one.span.last:
                visited = True
                found["flops"] += 2 * size * one.length
                found["attention_flops"] += 2 * 2 * SHAPE.hidden * one.pairs
                found["adapter_flops"] += 2 * lora * one.length
                found["cache_bytes"] += 2 * one.length * kv_bytes
                found["adapter_bytes"] += lora * 2
        found["weight_bytes"] += 2 * size * visited
        found["adapter_bytes"] += len(adapters) * lora * 2
    return found


def test_forward_is_counted_as_row_by_row() -> None:
    draw = random.Random(3)
    for _ in range(50):
        inference = tuple(
            InferenceSegment(
                n, 0, draw.randrange(1, 9), draw.randrange(20), 1, draw.choice([None, "a@1", "b@1"])
            )
            for n in range(draw.randrange(4))
        )
        spans = [sorted(draw.sample(range(SHAPE.layers + 1), 2)) for _ in range(draw.randrange(3))]
        training = tuple(
            window(f"j{n}", Direction.TRAIN_FORWARD, a, b, draw.randrange(1, 30), n)
            for n, (a, b) in enumerate(spans)
        )
        plan = BasePlan(inference=inference, training=training)
        counted = total(PlanCounter(SHAPE, ADAPTER).count(plan), PassKind.FORWARD)
        expected = naive(plan)
        for name in (
            "flops",
            "weight_bytes",
            "attention_flops",
            "cache_bytes",
            "adapter_flops",
            "adapter_bytes",
        ):
            assert counted[name] == pytest.approx(expected[name]), name


def test_passes_of_their_own_read_the_weights_again() -> None:
    size = 2 * sum(a * b for a, b in linears(SHAPE))
    decode, prompt = (InferenceSegment(n, 0, rows, 9, 1, "a@1") for n, rows in enumerate((1, 5)))
    apart = window("j", Direction.TRAIN_FORWARD, 1, SHAPE.layers, 7, 3)
    for passes in (Passes(*each) for each in product((False, True), repeat=2)):
        plan = BasePlan((decode, prompt), (apart,), passes=passes)
        counted = total(PlanCounter(SHAPE, ADAPTER).count(plan), PassKind.FORWARD)
        shared = total(PlanCounter(SHAPE, ADAPTER).count(replace(plan, passes=Passes())), PassKind.FORWARD)
        visits = Features.of(plan).visits((1 << SHAPE.layers) - 1)
        assert counted["weight_bytes"] == size * visits
        assert visits == SHAPE.layers * (1 + passes.decodes_apart) + (SHAPE.layers - 1) * passes.windows_apart
        assert counted["flops"] == shared["flops"] and counted["cache_bytes"] == shared["cache_bytes"]


def test_backward_reads_each_layer_as_often_as_the_scheduler_thinks() -> None:
    draw = random.Random(5)
    size = 2 * sum(a * b for a, b in linears(SHAPE))
    for _ in range(100):
        spans = [sorted(draw.sample(range(SHAPE.layers + 1), 2)) for _ in range(3)]
        training = tuple(
            window(job, Direction.BACKWARD, a, b, draw.randrange(1, 30), n)
            for n, (job, (a, b)) in enumerate(zip(("x", "y", draw.choice("xz")), spans, strict=True))
        )
        plan = BasePlan(training=training)
        counted = total(PlanCounter(SHAPE, ADAPTER, recompute=False).count(plan), PassKind.BACKWARD)
        assert counted["weight_bytes"] == size * Features.of(plan).visits((1 << SHAPE.layers) - 1)
        rows = sum(one.length * len(one.span) for one in training)
        assert counted["flops"] == pytest.approx(rows * size)  # two operations a weight, two bytes
        again = total(PlanCounter(SHAPE, ADAPTER).count(plan), PassKind.BACKWARD)
        assert again["weight_bytes"] == 2 * counted["weight_bytes"] and again["flops"] == 2 * counted["flops"]
        assert again["attention_flops"] == pytest.approx(7 / 5 * counted["attention_flops"])


def test_a_training_step_is_the_shapes_own_count() -> None:
    """`train_flops` counts a step of whole examples in closed form."""
    shape, rows = shape_named("255m"), 128
    pairs = rows * (rows + 1) // 2
    segments = [
        TrainingSegment(1, "j", "j@0", 0, rows, pairs, way, span, shape.layers)
        for way, span in (
            (Direction.TRAIN_FORWARD, Span(0, shape.layers)),
            (Direction.LOSS, Span(shape.layers, shape.layers + 1)),
            (Direction.BACKWARD, Span(0, shape.layers)),
        )
    ]
    for recompute in (False, True):
        counter = PlanCounter(shape, shape.lora_weights(8), recompute=recompute)
        works = [one for segment in segments for one in counter.count(BasePlan(training=(segment,)))]
        flops = sum(one.flops + one.attention_flops + one.adapter_flops for one in works)
        again = (
            2 * shape.hidden * 2 * pairs * shape.layers + rows * 2 * shape.lora_weights(8) if recompute else 0
        )
        assert flops == pytest.approx(train_flops(shape, 1, rows, 8, recompute) + again, rel=1e-9)


def test_decode_is_the_shapes_own_count() -> None:
    shape = shape_named("8b")
    plan = BasePlan(inference=tuple(InferenceSegment(n, 99, 1, 99, 1) for n in range(16)))
    works = PlanCounter(shape).count(plan)
    assert sum(one.weight_bytes + one.cache_bytes for one in works) == decode_bytes(shape, 16, 100)


def test_devices_share_all_but_what_they_exchange() -> None:
    plan = BasePlan(
        inference=(InferenceSegment(1, 0, 7, 0, 1, "a@1"),),
        training=(window("j", Direction.BACKWARD, 0, 4, 9), window("j", Direction.LOSS, 6, 7, 9, 1)),
        updates=(OptimStep("j"),),
        prefixes=(Prefix("a@1", (0,), 5, 2),),
    )
    one, four = (PlanCounter(SHAPE, ADAPTER, degree).count(plan) for degree in (1, 4))
    kinds = tuple(PassKind)
    whole, part = total(one, *kinds), total(four, *kinds)
    for name in whole.keys() - {"reductions", "reduced_bytes"}:
        assert part[name] == pytest.approx(whole[name] / 4), name
    assert whole["reductions"] == whole["reduced_bytes"] == 0
    # Two a layer forward, and again back, where it is computed a second time.
    assert part["reductions"] == 2 * SHAPE.layers * 2 + 2 * 4 * 2
    assert part["reduced_bytes"] == 2 * SHAPE.hidden * (2 * SHAPE.layers * (7 + 2) + 2 * 4 * 2 * 9)
