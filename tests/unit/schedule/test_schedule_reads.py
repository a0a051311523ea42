"""Costs of a streamed base: a step takes the longer of reading its weights and computing its rows."""

import math
import random
from itertools import pairwise

import pytest

from coserve.core.plan import WeightReads
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS, Features
from coserve.schedule.reads import ReadCosts
from coserve.schedule.segments import training_segment

DEPTH = 6
STREAMED = {1, 2, 4, 5}  # of the six layers
BLOCK, RATE = 30 << 20, 100 << 20  # 0.3 s a block


def streamed(**weights: float) -> CostModel:
    cost = CostModel(dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | weights)
    cost.reads.start(STREAMED, len(STREAMED) * BLOCK, RATE)
    return cost


def window(direction: Direction, first: int, last: int, rows: int = 8, job: str = "a"):  # type: ignore[no-untyped-def]
    return training_segment(
        MicroBatch(1, job, f"{job}@0", (rows,), DEPTH), 0, rows, direction, Span(first, last)
    )


def test_a_visit_reads_each_layer_that_does_not_stay_once_for_all_rows() -> None:
    layers = sum(1 << place for place in STREAMED)
    features = Features()
    assert features.visits(layers) == 0
    features.add_training(window(Direction.TRAIN_FORWARD, 0, 3))
    assert features.visits(layers) == 2
    features.add_training(window(Direction.TRAIN_FORWARD, 2, 5, job="b"))
    assert features.visits(layers) == 3
    features.add_inference(0, 4, 1, None)
    assert features.visits(layers) == 4
    features.add_training(window(Direction.BACKWARD, 3, 6))
    features.add_training(window(Direction.BACKWARD, 3, 6, job="b"))  # at the same layers: together
    assert features.visits(layers) == 6 == features.copy().visits(layers)
    features.add_training(window(Direction.BACKWARD, 0, 3))
    assert features.visits(layers) == 8
    features.add_fill(0, 3)  # a pass of its own
    assert features.visits(layers) == 12
    twin = features.copy()
    twin.add_training(window(Direction.BACKWARD, 0, 3))
    assert (twin.visits(layers), features.visits(layers)) == (14, 12)


def test_rows_are_free_while_weights_are_read() -> None:
    cost = streamed(forward_rows=0.01, window_rows=0.01, forward_layers=0.2)
    seconds = []
    for rows in (1, 50, 100, 101, 200):
        features = Features()
        features.add_inference(0, rows, 1, None)
        seconds.append(cost.predict_features(features))
    assert seconds[:3] == pytest.approx([1.2] * 3) and seconds[3:] == pytest.approx([1.21, 2.2])
    assert cost.free_rows == 100 and cost.pass_seconds == cost.reads.pass_seconds == pytest.approx(1.2)
    cost = streamed(forward_rows=0.01, window_rows=0.02, forward_layers=0.2)
    assert cost.free_rows == 50, "rows of windows, which ride"
    resident = CostModel()
    assert resident.free_rows == 0 == resident.reads.pass_seconds
    assert resident.pass_seconds == resident.weights["forward_layers"]


def test_it_learns_the_rate_and_the_arithmetic_apart() -> None:
    """Whatever hides what: the disk is half as quick as assumed, the rows take three times their time."""
    draw = random.Random(0)
    cost = streamed(forward_rows=0.001, forward_layers=0.1)
    for _ in range(400):
        rows = draw.choice([1, 20, 400, 1000])
        features = Features()
        features.add_inference(0, rows, 0, None)
        read, computed = len(STREAMED) * BLOCK / (RATE / 2), 0.1 + 0.003 * rows
        seconds = max(read, computed)
        reads = WeightReads(len(STREAMED) * BLOCK, read, seconds - computed)
        cost.observe(features, seconds, reads=reads)
    assert cost.reads.rate == pytest.approx(RATE / 2, rel=0.01)
    for rows in (400, 2000):
        features = Features()
        features.add_inference(0, rows, 0, None)
        wanted = max(2.4, 0.1 + 0.003 * rows)
        assert cost.predict_features(features) == pytest.approx(wanted, rel=0.15)


def test_a_step_that_read_nothing_teaches_no_rate() -> None:
    costs = ReadCosts()
    costs.start({0}, 10, 5.0)
    costs.observe(WeightReads())
    costs.observe(WeightReads(100, 1e-9))  # too little to say anything
    assert costs.rate == 5.0
    costs.observe(WeightReads(1 << 30, 1.0))
    assert 5.0 < costs.rate < 1 << 30


def test_nothing_is_read_of_a_resident_base() -> None:
    costs = ReadCosts()
    assert costs.seconds(0) == 0.0 == costs.pass_seconds and math.isinf(costs.rate)
    costs.start((), 0, 0.0)  # all fits
    assert costs.pass_seconds == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_an_iteration_waits_for_each_of_its_passes(seed: int) -> None:
    """It takes what its steps take: arithmetic on the way back hides no reading on the way forward."""
    draw = random.Random(seed)
    cost = streamed(forward_rows=0.03 * draw.random(), backward_rows=0.1 * draw.random(), loss_rows=0.01)
    rows = draw.randrange(5, 40)
    batch = MicroBatch(1, "a", "a@0", (rows,), DEPTH)
    ways = [
        (Direction.TRAIN_FORWARD, 0, DEPTH),
        (Direction.LOSS, DEPTH, DEPTH + 1),
        (Direction.BACKWARD, 0, DEPTH),
    ]
    steps = [Features.of_segments((), [window(*way, rows)]) for way in ways]
    taken = sum(map(cost.predict_features, steps))
    assert cost.predict_iteration([batch]) == pytest.approx(taken)


def test_predictions_grow_with_every_visit() -> None:
    cost = streamed(forward_rows=1e-4, backward_rows=2e-4)
    draw = random.Random(1)
    for _ in range(50):
        features, before = Features(), [0.0]
        for _ in range(draw.randrange(1, 9)):
            first = draw.randrange(DEPTH)
            way = draw.choice([Direction.TRAIN_FORWARD, Direction.BACKWARD])
            rows, job = draw.randrange(1, 99), draw.choice("abc")
            features.add_training(window(way, first, draw.randrange(first + 1, DEPTH + 1), rows, job))
            before.append(cost.predict_features(features))
        assert all(a <= b for a, b in pairwise(before))
