from dataclasses import replace
from itertools import product

import pytest

from coserve.core.plan import BasePlan, OptimStep
from coserve.core.request import BASE, Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import INFINITE, Allowance
from coserve.schedule.segments import training_segment
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.training_packer import TrainingPacker, in_order
from steps import step_costs

DEPTH = 16
CONFIG = SchedulerConfig(layers=DEPTH, max_positions=1024)


def micro_batch(rows: int = 700, direction: Direction = Direction.TRAIN_FORWARD) -> MicroBatch:
    """A micro-batch that has just begun to travel in `direction`."""
    batch = MicroBatch(9, "job", "a@0", (rows,), DEPTH)
    while batch.direction is not direction:
        batch.advance(0, rows, batch.next_span(DEPTH))
    return batch


def builder(inference: bool) -> PlanBuilder:
    it = PlanBuilder(0.0)
    if inference:
        sequence = Sequence(1, Request("r", (1,) * 50))
        it.add(sequence, 50)
    return it


def fill(batch: MicroBatch, seconds: float, inference: bool = True, **allowance: object) -> PlanBuilder:
    it = builder(inference)
    options = {"rows": 512} | allowance
    TrainingPacker(it, Allowance(seconds, **options), step_costs(), CONFIG).window(batch)  # type: ignore[arg-type]
    return it


def added(it: PlanBuilder, inference: bool = True) -> float:
    whole = CostModel().predict(
        BasePlan(tuple(it.inference), tuple(it.training), tuple(update for _, update in it.updates))
    )
    return whole - (CostModel().predict(BasePlan(tuple(it.inference))) if inference else 0.0)


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD])
@pytest.mark.parametrize("inference", [False, True])
def test_the_budget_is_used_and_kept(direction: Direction, inference: bool) -> None:
    last = 0
    for seconds in (0.005, 0.01, 0.02, 0.05, 0.2, 1.0):
        it = fill(micro_batch(direction=direction), seconds, inference)
        work = sum(segment.length * len(segment.span) for segment in it.training)
        assert it.training == [] or added(it, inference) <= seconds + 1e-12
        assert work >= last
        last = work
    assert last == 512 * (1 if direction is Direction.LOSS else DEPTH)


def test_no_other_rung_would_do_more() -> None:
    model, batch, seconds = CostModel(), micro_batch(direction=Direction.BACKWARD), 0.03
    (chosen,) = fill(batch, seconds).training
    inference = tuple(builder(True).inference)
    for rows in (512, 256, 128, 64, 32):
        for layers in range(2, DEPTH + 1):
            other = training_segment(batch, 700 - rows, rows, Direction.BACKWARD, Span(DEPTH - layers, DEPTH))
            if model.predict(BasePlan(inference, (other,))) - model.predict(BasePlan(inference)) <= seconds:
                assert rows * layers <= chosen.length * len(chosen.span)


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("inference", [False, True])
def test_a_window_that_may_not_be_cut_stays_whole_or_waits(direction: Direction, inference: bool) -> None:
    layer = added(fill(micro_batch(400, direction), 0.0, inference, minimum=INFINITE, cut=False), inference)
    for seconds, layers in ((0.99 * layer, 0), (1.01 * layer, 1), (1.0, DEPTH)):
        cut = fill(micro_batch(400, direction), seconds, inference).training
        whole = fill(micro_batch(400, direction), seconds, inference, cut=False).training
        assert [(segment.length, len(segment.span)) for segment in whole] == (
            [(400, layers)] if layers else []
        )
        assert layers or 0 < cut[0].length < 400


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.BACKWARD])
def test_windows_that_arrivals_abandon_are_as_large_beside_answers_as_alone(direction: Direction) -> None:
    """Beside answers they go forward apart from them, and read the weights again."""
    batch, seconds = micro_batch(4096, direction), {}
    for abandons, inference in product((False, True), repeat=2):
        it = builder(inference)
        it.abandons, before = abandons, it.predict(step_costs())
        packer = TrainingPacker(it, Allowance(60.0, 2048, abandons=abandons), step_costs(), CONFIG)
        assert packer.window(batch)
        (window,) = it.training
        assert (window.length, len(window.span)) == (2048, DEPTH)
        seconds[abandons, inference] = it.predict(step_costs()) - before
        if inference:  # else the step itself is paid for, too
            assert packer.left == pytest.approx(60.0 - seconds[abandons, inference])
    shares = direction is Direction.TRAIN_FORWARD
    assert seconds[True, True] == pytest.approx(seconds[True, False])
    assert seconds[False, False] == pytest.approx(seconds[True, False])
    assert (seconds[False, True] < 0.999 * seconds[True, True]) is shares


def test_a_loss_may_be_cut_always() -> None:
    (segment,) = fill(micro_batch(400, Direction.LOSS), 0.02, cut=False).training
    assert 0 < segment.length < 400


def test_nothing_fits_into_nothing() -> None:
    assert fill(micro_batch(), 0.0).training == []
    assert fill(micro_batch(), -1.0).training == []


def test_a_window_put_down_goes_on_where_it_lies() -> None:
    batch = micro_batch()
    batch.advance(0, 100, Span(0, 3))
    (segment,) = fill(batch, 0.004).training
    assert segment.start == 0 and segment.length <= 100 and segment.span.first == 3
    (cut,) = fill(batch, 0.002).training
    assert (cut.start, cut.span.first) == (0, 3) and 0 < cut.length * len(cut.span) < 100 * (DEPTH - 3)


def test_the_smallest_piece_runs_within_the_minimum() -> None:
    (segment,) = fill(micro_batch(direction=Direction.BACKWARD), 0.0, minimum=INFINITE).training
    assert (segment.start, segment.length, segment.span) == (668, 32, Span(DEPTH - 1, DEPTH))
    assert fill(micro_batch(direction=Direction.BACKWARD), 0.0, minimum=1e-6).training == []


def test_losses_may_come_in_quarters_of_the_smallest_window() -> None:
    least, weight = CONFIG.min_training_rows // 4, CostModel().weights["loss_rows"]
    (segment,) = fill(micro_batch(direction=Direction.LOSS), 1.5 * least * weight).training
    assert (segment.start, segment.length, segment.direction) == (0, least, Direction.LOSS)
    assert segment.span == Span(DEPTH, DEPTH + 1)
    (segment,) = fill(micro_batch(direction=Direction.LOSS), 2.5 * least * weight).training
    assert segment.length == 2 * least
    assert fill(micro_batch(direction=Direction.LOSS), 0.9 * least * weight).training == []
    (segment,) = fill(micro_batch(direction=Direction.LOSS), 0.0, minimum=INFINITE).training
    assert segment.length == least


def test_the_minimum_is_for_the_first_piece_only() -> None:
    it = builder(True)
    packer = TrainingPacker(it, Allowance(0.0, 512, minimum=INFINITE), step_costs(), CONFIG)
    assert packer.window(micro_batch())
    assert not packer.window(micro_batch())
    assert len(it.training) == 1


def test_whole_micro_batches() -> None:
    (segment,) = fill(micro_batch(), INFINITE, rows=None).training
    assert (segment.length, segment.span) == (700, Span(0, DEPTH))


def test_only_one_job_may_travel() -> None:
    assert fill(micro_batch(), INFINITE, job="other").training == []
    assert len(fill(micro_batch(), INFINITE, job="job").training) == 1


def test_an_update_is_paid_for() -> None:
    it = builder(True)
    packer = TrainingPacker(it, Allowance(0.0051, 512), step_costs(), CONFIG)
    assert packer.update(BASE, OptimStep("job"))
    assert packer.left == pytest.approx(0.0001)
    assert not packer.update(BASE, OptimStep("other"))
    assert it.updates == [(BASE, OptimStep("job"))]


def test_where_no_window_has_that_room_the_largest_runs() -> None:
    weights = dict.fromkeys(CostModel().weights, 0.0) | {"backward_layers": 1.0 * DEPTH}
    it = builder(True)
    TrainingPacker(it, Allowance(1.5, 512), step_costs(weights), CONFIG).window(
        micro_batch(direction=Direction.BACKWARD)
    )
    assert [(segment.length, len(segment.span)) for segment in it.training] == [(512, 1)]


def test_forward_before_the_rest() -> None:
    back = training_segment(micro_batch(), 0, 1, Direction.BACKWARD, Span(0, 1))
    loss = training_segment(micro_batch(), 0, 1, Direction.LOSS, Span(DEPTH, DEPTH + 1))
    keep = training_segment(micro_batch(), 0, 1, Direction.TRAIN_FORWARD, Span(0, 1))
    assert in_order([back, loss, keep]) == (keep, back, loss)


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.BACKWARD])
def test_windows_begin_where_states_are_kept(direction: Direction) -> None:
    """Whatever the allowances, and where a window that was paused is cut: forward they end there, and back
    they begin there. Where nothing is in the way one takes all rows."""
    config = replace(CONFIG, state_rows=128)
    for times, limits in (
        ((0.004, 0.02, 0.2), (512, 60, 300)),
        ((0.004, 0.2), (130, None)),
        ((9.0,), (700,)),
    ):
        batch, ends = micro_batch(direction=direction), set[int]()
        while batch.direction is direction and not batch.done:
            for seconds, rows in product(times, limits):
                if batch.direction is not direction or batch.done:
                    break
                it = builder(False)
                allowance = Allowance(seconds, rows=rows, minimum=INFINITE)
                TrainingPacker(it, allowance, step_costs(), config).window(batch)
                for segment in it.training:
                    ends |= {segment.start, segment.start + segment.length}
                    batch.advance(segment.start, segment.length, segment.span)
        assert all(end % 128 == 0 or end == 700 for end in ends)
        assert len(ends) == 2 if limits == (700,) else len(ends) > 2


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD])
@pytest.mark.parametrize("rows", [512, 16, None])
def test_a_fixed_window_is_never_cut(direction: Direction, rows: int | None) -> None:
    """Whatever the allowance: a micro-batch is always cut at the same rows, and back at those that forward
    was."""
    config = replace(CONFIG, training_window=96)
    rung = 24 if direction is Direction.LOSS else 96
    batch = micro_batch(rows=250, direction=direction)
    windows = []
    for seconds in (0.001, 0.02, 0.004) * 200:
        if batch.done or batch.direction is not direction:
            break
        it = builder(False)
        TrainingPacker(it, Allowance(seconds, rows=rows, minimum=INFINITE), step_costs(), config).window(
            batch
        )
        (segment,) = it.training
        windows.append((segment.start, segment.length))
        batch.advance(segment.start, segment.length, segment.span)
    cuts = range(0, 250, rung)
    want = [(start, min(rung, 250 - start)) for start in cuts]
    if direction is Direction.BACKWARD:
        want.reverse()
    assert list(dict.fromkeys(windows)) == want
    assert batch.direction is not direction or batch.done


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD])
@pytest.mark.parametrize("inference", [False, True])
def test_what_one_job_leaves_of_a_quantum_cuts_no_window_of_the_next(
    direction: Direction, inference: bool
) -> None:
    """Beside answers every bit counts; without them the next window waits for a step where it stays whole."""
    first, second = micro_batch(128, direction), micro_batch(512, direction)
    it = builder(inference)
    packer = TrainingPacker(it, Allowance(1.0, rows=512), step_costs(), CONFIG)
    assert packer.window(first) and it.training[0].length == 128
    packer.left = added(fill(second, 1.0, inference, rows=64), inference)
    packer.left /= 1 if direction is Direction.LOSS else DEPTH
    assert packer.window(second) is inference
    assert all(segment.length < 512 for segment in it.training)
    packer.left = 10.0
    assert packer.window(second) and it.training[-1].length == 512


def alone(batch: MicroBatch, arrivals: float | None, most: int = 4096, cost: StepCosts | None = None) -> int:
    """Rows of the first window that has the machine to itself."""
    it = PlanBuilder(0.0)
    allowance = Allowance(60.0, most, minimum=INFINITE, arrivals=arrivals)
    TrainingPacker(it, allowance, cost or step_costs(), CONFIG).window(batch)
    return it.training[0].length


@pytest.mark.parametrize("direction", [Direction.TRAIN_FORWARD, Direction.BACKWARD])
def test_windows_alone_are_as_large_as_arrivals_and_memory_leave_worth_it(direction: Direction) -> None:
    """A layer of W rows takes T = a + b W seconds; r arrivals a second lose r T / 2 of it."""
    model, rows = CostModel(), 2048
    way = "forward" if direction is Direction.TRAIN_FORWARD else "backward"
    pairs = rows * (rows + 1) / 2 * model.weights[f"{way}_attention"] / rows
    a = model.weights[f"{way}_layers"] / DEPTH
    b = (model.weights[f"{way}_rows"] + pairs) / DEPTH
    chosen = set[int]()
    for arrivals in (0.0, 0.5, 2.0, 8.0, 40.0, 200.0, 5000.0):
        times = {size: a + b * size for size in (2048, 1024, 512, 256, 128, 64, 32)}
        best = min(times, key=lambda size: (times[size] + arrivals * times[size] ** 2 / 2) / size)
        assert alone(micro_batch(rows, direction), arrivals) == best, arrivals
        chosen.add(best)
    assert 2048 in chosen and len(chosen) > 2
    assert alone(micro_batch(rows, direction), 0.0, most=1200) == 1200, "what memory bears"
    assert alone(micro_batch(rows, direction), 0.0, most=1) == CONFIG.reserved_rows, "which is reserved"


def test_a_window_alone_that_has_begun_is_not_cut_for_arrivals() -> None:
    batch = micro_batch(2048)
    batch.advance(0, 2048, Span(0, 3))
    assert alone(batch, 1000.0) == 2048


def test_losses_alone_come_in_pieces_that_arrivals_can_wait_for() -> None:
    assert alone(micro_batch(2048, Direction.LOSS), 0.0) == CONFIG.reserved_rows // 4
