"""Windows of several jobs that pass layers together, and the seconds predicted for them."""

import itertools
import random
import secrets

import pytest

from coserve.core.plan import TrainingSegment
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import Features
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import INFINITE, Allowance
from coserve.schedule.segments import training_segment
from coserve.schedule.training_packer import TrainingPacker
from coserve.schedule.training_queue import TrainingQueue, rows_through
from steps import step_costs

DEPTH = 8
CONFIG = SchedulerConfig(layers=DEPTH, max_positions=1024)
KEYS = itertools.count(1)


def batch(job: str, rows: int = 128, layer: int = 0) -> MicroBatch:
    """A micro-batch of a job, put down below `layer` on its way forward."""
    made = MicroBatch(next(KEYS), job, f"{job}@0", (rows,), DEPTH)
    if layer:
        made.advance(0, rows, Span(0, layer))
    return made


def choose(batches: list[MicroBatch], seconds: float = INFINITE, **options: object) -> list[TrainingSegment]:
    builder = PlanBuilder(0.0)
    allowance = Allowance(seconds, **{"rows": 512, **options})  # type: ignore[arg-type]
    TrainingPacker(builder, allowance, step_costs(), CONFIG).window_group(batches[0], batches)
    return builder.training


def test_windows_at_one_layer_go_together_as_far_as_rows_go() -> None:
    batches = [batch(f"job {i}") for i in range(6)]
    chosen = choose(batches)
    assert [segment.job for segment in chosen] == [batch.job for batch in batches[:4]]
    assert {(s.start, s.length, s.span) for s in chosen} == {(0, 128, Span(0, DEPTH))}


def test_who_is_elsewhere_stays_out() -> None:
    first, higher, beside, own = batch("a"), batch("b", layer=3), batch("c"), batch("a")
    back = batch("d")
    back.direction, back.frontier = Direction.BACKWARD, back.length
    assert [s.key for s in choose([first, higher, back, own, beside])] == [first.key, beside.key]
    assert choose([higher, first, beside]) == []


def test_the_allowance_holds() -> None:
    batches = [batch(f"job {i}") for i in range(4)]
    model = CostModel()
    last = 0.0
    for seconds in (0.02, 0.05, 0.1, 0.2, 1.0):
        chosen = choose(batches, seconds)
        taken = model.predict_features(Features.of_segments((), chosen)) if chosen else 0.0
        assert last <= taken <= seconds + model.weights["step"]
        last = taken
    assert len(choose(batches, 1.0)) == 4 and choose(batches, 0.002) == []


@pytest.mark.parametrize("options", [{"job": "job 0"}, {"rows": None}, {"rows": 0}, {"rows": 200}])
def test_nobody_joins_where_one_trains_alone_or_rows_do_not_last(options: dict[str, object]) -> None:
    assert choose([batch(f"job {i}") for i in range(3)], **options) == []


def test_jobs_at_a_layer_share_a_pass_back_over_its_weights() -> None:
    def of(*parts: tuple[str, int, int]) -> float:
        segments = [training_segment(batch(j), 0, 16, Direction.BACKWARD, Span(a, b)) for j, a, b in parts]
        return Features.of_segments((), segments).counted()["backward_layers"] * DEPTH

    assert of(("a", 0, 4)) == 4
    assert of(("a", 0, 4), ("b", 0, 4), ("c", 0, 4)) == 4
    assert of(("a", 0, 4), ("b", 2, 6)) == 6
    assert of(("a", 0, 4), ("a", 0, 4)) == 8, "a job's own windows go one after the other"


def test_in_company_too_jobs_get_rows_by_their_weights() -> None:
    """Whoever is ahead waits, so that all are level in the long run."""
    draws = random.Random(secrets.randbits(32))
    weights = {f"job {i}": draws.choice((0.5, 1.0, 2.0, 4.0)) for i in range(4)}
    book, rows = TrainingQueue(2), dict.fromkeys(weights, 0)
    for job, weight in weights.items():
        book.add(job, [batch(job) for _ in range(4000)], weight)
    for _ in range(600):
        jobs, _ = book.turns(0.0, None)
        first = jobs[0].micro_batches[0]
        chosen = {segment.key: segment for segment in choose([first, *book.level(jobs[0], jobs)])}
        for segment in chosen.values() or [
            training_segment(first, 0, 128, Direction.TRAIN_FORWARD, Span(0, DEPTH))
        ]:
            moved = book.find(segment)
            assert moved is not None
            moved.done = True  # it is there: what counts here is the share
            moved.under_way += 1
            book.ran(moved, segment.length)
            rows[moved.job] += segment.length
    least, most = (f(rows[job] / weight for job, weight in weights.items()) for f in (min, max))
    assert most - least <= 3 * 128 / min(weights.values()), (rows, weights)


def test_small_and_large_ones_that_went_forward_together_come_back_together() -> None:
    """By progress alone the large job would be out of the small one's reach after their way forward."""
    small, large = batch("small", 32), batch("large", 64)
    book = TrainingQueue(1)
    book.add("small", [small])
    book.add("large", [large])

    def choice() -> list[MicroBatch]:
        jobs, _ = book.turns(0.0, None)
        return book.level(jobs[0], jobs)

    for span in (Span(0, DEPTH), Span(DEPTH, DEPTH + 1)):
        assert choice() == [small, large]
        for one in (small, large):
            one.advance(0, one.length, span)
            one.under_way += 1
            book.ran(one, rows_through(one, one.length, len(span)))
    assert {segment.job for segment in choose(choice())} == {"small", "large"}
    book.add("ahead", [fresh := batch("ahead", 64)])
    book.ran(fresh, 128)
    assert fresh not in choice(), "it has not begun, and has had more"


def test_a_group_may_follow_the_tails_of_others() -> None:
    tail = batch("tail")
    tail.advance(0, 128, Span(0, DEPTH))
    ready = [batch("a"), batch("b")]
    builder = PlanBuilder(0.0)
    packer = TrainingPacker(builder, Allowance(INFINITE, rows=512), step_costs(), CONFIG)
    assert packer.window(tail) and packer.window_group(ready[0], ready)
    assert [s.job for s in builder.training] == ["tail", "a", "b"]
    assert not packer.window_group(ready[0], [batch("c"), batch("d")]), "one group a step"
