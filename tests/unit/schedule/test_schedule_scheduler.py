from dataclasses import replace

import pytest
from msgspec import structs

from coserve.core.events import Event, Finished, JobFailed, StepDone, TokenEvent, TrainingProgress
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import SLO, FinishReason, Request, SamplingParams
from coserve.core.row_buckets import RowBuckets
from coserve.core.sequence import Direction, MicroBatch
from coserve.errors import ConfigError, LossNotFinite, PromptTooLong
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor
from steps import apply

DEPTH = 4


def world(pages: int = 64, policy: str = "hybrid", **config: object) -> tuple[Scheduler, ScriptedExecutor]:
    settings: dict[str, object] = {"layers": DEPTH, "max_positions": 512} | config
    pool = PagePool(pages, 4)
    it = Scheduler(BaseCache(SchedulerConfig(**settings), pool), CostModel(), make_policy(policy))  # type: ignore[arg-type]
    return it, ScriptedExecutor(4)


def request(prompt: int = 6, answer: int = 4, arrival: float = 0.0, slo: SLO | None = None) -> Request:
    sampling = SamplingParams(max_tokens=answer)
    return Request("r", tuple(range(prompt)), sampling, slo=slo or SLO(), arrival=arrival)


def micro_batches(it: Scheduler, job: str = "job", rows: int = 64, count: int = 1) -> list[MicroBatch]:
    return [MicroBatch(it.new_key(), job, f"{job}@0", (rows,), DEPTH) for _ in range(count)]


def drain(it: Scheduler, executor: ScriptedExecutor) -> list[Event]:
    events: list[Event] = []
    for _ in range(2000):
        if not it.has_work:
            return events
        events += executor.step(it)
    raise AssertionError("the work does not end")


def test_a_request_runs_to_its_end() -> None:
    it, executor = world()
    sequence = it.requests.submit(request(), 0.0)
    events = drain(it, executor)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [event.token for event in tokens] == sequence.output
    assert [event.finish_reason for event in tokens] == [None, None, None, FinishReason.LENGTH]
    assert [len(plan.inference) for plan in executor.plans] == [1, 1, 1, 1, 0]
    assert executor.plans[-1].released == (sequence.key,)
    assert (it.stats.prefill_tokens, it.stats.decode_tokens, it.stats.steps) == (6, 3, 4)


def test_a_refused_request_leaves_nothing() -> None:
    it, _ = world()
    with pytest.raises(PromptTooLong):
        it.requests.submit(request(prompt=510), 0.0)
    assert not it.has_work


def test_a_long_prompt_goes_in_chunks_and_shares_the_rows() -> None:
    it, executor = world(max_prefill_rows=10, min_prefill_rows=4)
    it.requests.submit(request(prompt=14), 0.0)
    it.requests.submit(request(prompt=14), 0.0)
    executor.step(it)
    executor.step(it)
    executor.step(it)
    rows = [sorted(segment.length for segment in plan.inference) for plan in executor.plans]
    assert rows == [[10], [4, 6], [1, 8]]


def test_chunks_are_whole_rows_of_the_device_s_buckets() -> None:
    """The last one, and one too small for a bucket, are what they are."""
    it, executor = world(max_prefill_rows=18, min_prefill_rows=4, row_buckets=RowBuckets(coarse=8))
    it.requests.submit(request(prompt=43), 0.0)
    it.requests.submit(request(prompt=6), 0.0)
    for _ in range(4):
        executor.step(it)
    rows = [[segment.length for segment in plan.inference] for plan in executor.plans]
    assert rows == [[16, 2], [16, 2], [11, 2], [1, 1]]


LATER = 100.0  # seconds after which nobody with a bound is expected


@pytest.mark.parametrize(
    ("slo", "newcomer", "after", "lengths"),
    [
        (SLO(), False, 0.0, [14, 14]),
        (SLO(first_token=1e6), False, 0.0, [10]),
        (SLO(slowdown=2.0), False, 0.0, [10]),
        (SLO(), True, 0.0, [10]),
        (SLO(first_token=1e6), False, LATER, [14, 14]),
    ],
)
def test_prompts_are_cut_where_somebody_lately_had_a_bound(
    slo: SLO, newcomer: bool, after: float, lengths: list[int]
) -> None:
    it, executor = world(max_prefill_rows=40, bounded_prefill_rows=10, min_prefill_rows=4)
    it.requests.submit(structs.replace(request(prompt=3, answer=1, slo=slo), newcomer=newcomer), 0.0)
    drain(it, executor)
    executor.now += after
    it.requests.submit(request(prompt=14), executor.now)
    it.requests.submit(request(prompt=14), executor.now)
    executor.step(it)
    assert [segment.length for segment in executor.plans[-1].inference] == lengths


def test_prompts_are_cut_while_an_answer_with_a_bound_goes_on() -> None:
    it, executor = world(max_prefill_rows=40, bounded_prefill_rows=10, min_prefill_rows=4)
    it.requests.submit(request(prompt=3, answer=9, slo=SLO(between_tokens=1e6)), 0.0)
    executor.step(it)
    executor.now += LATER
    it.requests.submit(request(prompt=14), executor.now)
    executor.step(it)
    assert [segment.length for segment in executor.plans[-1].inference] == [1, 10]


def test_prompts_take_the_rows_that_would_pad_decode_rows() -> None:
    """A step with as many whole buckets of prompts as it may have, and one that decode rows share."""
    it, executor = world(max_prefill_rows=16, min_prefill_rows=4, row_buckets=RowBuckets(coarse=8))
    it.requests.submit(request(prompt=3, answer=9), 0.0)
    it.requests.submit(request(prompt=3, answer=9), 0.0)
    executor.step(it)
    it.requests.submit(request(prompt=30), executor.now)
    it.requests.submit(request(prompt=30), executor.now)
    for _ in range(3):
        executor.step(it)
    rows = [[segment.length for segment in plan.inference] for plan in executor.plans]
    assert rows == [[3, 3], [1, 1, 22], [1, 1, 8, 14], [1, 1, 1, 16]]


def test_an_urgent_prompt_overtakes_a_long_one() -> None:
    it, executor = world(max_prefill_rows=10, min_prefill_rows=4, pages=128)
    long = it.requests.submit(request(prompt=100), 0.0)
    executor.step(it)
    urgent = it.requests.submit(request(prompt=16, slo=SLO(first_token=0.1)), executor.now)
    executor.step(it)
    executor.step(it)
    rows = [{segment.key: segment.length for segment in plan.inference} for plan in executor.plans]
    assert rows == [{long.key: 10}, {urgent.key: 10}, {urgent.key: 6, long.key: 4}]


def test_prompts_that_run_go_on_when_no_pages_are_left_to_enter() -> None:
    it, executor = world(max_prefill_rows=10, min_prefill_rows=4, pages=9)
    long = it.requests.submit(request(prompt=30), 0.0)
    executor.step(it)
    it.requests.submit(request(prompt=16, slo=SLO(first_token=0.1)), executor.now)
    executor.step(it)
    assert [segment.key for segment in executor.plans[-1].inference] == [long.key]


def test_a_chunk_shrinks_to_keep_the_tokens_of_others_coming() -> None:
    it, executor = world(max_prefill_rows=400, pages=200)
    it.requests.submit(request(answer=20, slo=SLO(between_tokens=0.04)), 0.0)
    executor.step(it)
    for trains in (False, True) * 16:
        it.cost.misses.observe(1.0, trains)  # this machine does what is predicted
    it.requests.submit(request(prompt=400), executor.now)
    executor.step(it)
    plan = executor.plans[-1]
    chunk = max(segment.length for segment in plan.inference)
    assert 100 < chunk < 400
    assert 0.035 < plan.predicted <= 0.04


def test_a_prompt_progresses_even_where_no_time_is_left() -> None:
    it, executor = world(min_prefill_rows=8)
    it.requests.submit(request(answer=20, slo=SLO(between_tokens=0.0)), 0.0)
    executor.step(it)
    it.requests.submit(request(prompt=20), executor.now)
    executor.step(it)
    assert sorted(segment.length for segment in executor.plans[-1].inference) == [1, 8]


def test_at_most_max_running() -> None:
    it, executor = world(max_running=2)
    for _ in range(5):
        it.requests.submit(request(), 0.0)
    executor.step(it)
    assert (len(it.requests.running), len(it.requests.waiting)) == (2, 3)
    drain(it, executor)
    assert max(len(plan.inference) for plan in executor.plans) == 2


def test_nobody_enters_in_a_step_that_took_pages() -> None:
    it, executor = world(pages=5)
    first = it.requests.submit(request(prompt=7, answer=9), 0.0)
    second = it.requests.submit(request(prompt=7, answer=9, arrival=0.1), 0.0)
    third = it.requests.submit(request(prompt=2, answer=2, arrival=0.2), 0.0)
    entered = []
    while not second.preemptions:
        executor.step(it)
        entered.append({segment.key for segment in executor.plans[-1].inference})
    assert entered[0] == {first.key, second.key, third.key}
    late = it.requests.submit(request(prompt=1, answer=1, arrival=0.3), 0.0)
    assert entered[-1] == {first.key}
    assert second.key in [key for plan in executor.plans for key in plan.released]
    drain(it, executor)
    assert all(len(s.output) == s.request.sampling.max_tokens for s in (first, second, third, late))


def test_cancelling_waiting_and_running() -> None:
    it, executor = world(max_running=1)
    first, second = it.requests.submit(request(), 0.0), it.requests.submit(request(), 0.0)
    executor.step(it)
    it.requests.cancel(first.key)
    it.requests.cancel(second.key)
    it.requests.cancel(second.key)
    it.requests.cancel(999)
    events = drain(it, executor)
    assert events == [
        Finished(first.key, "r", FinishReason.CANCELLED),
        Finished(second.key, "r", FinishReason.CANCELLED),
    ]
    assert executor.plans[-1].released == (first.key,)
    assert not it.requests.running and not it.requests.waiting


def test_a_stop_string_ends_an_answer() -> None:
    it, executor = world()
    sequence = it.requests.submit(request(slo=SLO(first_token=9.0)), 0.0)
    executor.step(it)
    it.requests.finish(sequence.key, FinishReason.STOP)
    assert drain(it, executor) == [Finished(sequence.key, "r", FinishReason.STOP)]
    assert it.stats.slo_met == 1


def test_answers_to_the_cancelled_are_dropped() -> None:
    it, executor = world()
    sequence = it.requests.submit(request(), 0.0)
    plan = it.plan(0.0).only
    result = executor.run(plan)
    it.requests.cancel(sequence.key)
    assert apply(it, result, executor.now) == [Finished(sequence.key, "r", FinishReason.CANCELLED)]
    assert sequence.output == []


def test_a_job_steps_and_waits_for_more() -> None:
    it, executor = world()
    batches = micro_batches(it, rows=200, count=3)
    it.training.add("job", batches)
    events = drain(it, executor)
    assert [event.job for event in events if isinstance(event, StepDone)] == ["job"]
    assert all(batch.done for batch in batches)
    rows = [(e.direction, e.rows) for e in events if isinstance(e, TrainingProgress)]
    assert sum(r for way, r in rows if way is Direction.TRAIN_FORWARD) == pytest.approx(600)
    assert sum(r for way, r in rows if way is Direction.LOSS) == pytest.approx(600 / DEPTH)
    assert sum(r for way, r in rows if way is Direction.BACKWARD) == pytest.approx(600)
    assert (it.stats.kept_rows, it.stats.backward_rows) == pytest.approx((600, 600))
    released = [key for plan in executor.plans for key in plan.released]
    assert sorted(released) == [batch.key for batch in batches]
    it.training.add("job", micro_batches(it))
    drain(it, executor)
    assert it.stats.updates == 2 and executor.trained == {"job": 664}


def test_a_step_is_not_given_twice() -> None:
    it, _ = world()
    it.training.add("job", micro_batches(it))
    with pytest.raises(AssertionError, match="last step"):
        it.training.add("job", micro_batches(it))
    with pytest.raises(AssertionError, match="micro-batch"):
        it.training.add("other", [], is_pass=True)  # an optimizer step alone may follow passes


def test_at_most_so_many_micro_batches_in_flight() -> None:
    it, executor = world(micro_batches_in_flight=2, quantum=10.0)
    batches = micro_batches(it, count=4)
    it.training.add("job", batches)
    executor.step(it)
    assert [segment.key for segment in executor.plans[0].training] == [batch.key for batch in batches[:2]]


def test_a_removed_job_is_released_in_the_next_plan() -> None:
    it, executor = world()
    batches = micro_batches(it, rows=3000, count=2)
    it.training.add("job", batches)
    executor.step(it)
    it.training.remove("job")
    it.training.remove("job")
    executor.step(it)
    assert set(executor.plans[-1].released) == {batch.key for batch in batches}
    assert not executor.plans[-1].training and not it.has_work


def test_a_failed_job_leaves_and_others_go_on() -> None:
    it, _ = world()
    error = LossNotFinite("the loss of job bad is nan")
    executor = ScriptedExecutor(4, failures={"bad": error})
    bad, good = micro_batches(it, "bad", rows=3000), micro_batches(it, "good")
    it.training.add("bad", bad)
    it.training.add("good", good)
    events = drain(it, executor)
    assert JobFailed("bad", error) in events
    assert executor.trained == {"good": 64}
    assert bad[0].key in [key for plan in executor.plans for key in plan.released]


def test_an_update_needs_an_answer() -> None:
    it, executor = world()
    it.training.add("job", micro_batches(it))
    while not (plan := it.plan(executor.now).only).updates:
        apply(it, executor.run(plan), executor.now)
    with pytest.raises(AssertionError, match="no answer"):
        apply(it, BaseResult(0.1), executor.now)


def test_training_rides_along_and_is_counted() -> None:
    it, executor = world(policy="hybrid:fused")
    sequence = it.requests.submit(request(answer=30), 0.0)
    it.training.add("job", micro_batches(it, rows=2000))
    while not sequence.is_finished:
        executor.step(it)
    assert it.stats.fused_possible == it.stats.steps == 30
    assert it.stats.fused_steps > 25
    assert 0 < sequence.deferred < executor.now


def test_deferral_is_the_time_that_training_took() -> None:
    it, executor = world()
    it.requests.submit(request(answer=1), 0.0)
    alone = it.cost.first.predict(BasePlan(it.plan(0.0).only.inference))
    it, executor = world(policy="hybrid:fused")
    sequence = it.requests.submit(request(answer=1), 0.0)
    it.training.add("job", micro_batches(it, rows=2000))
    executor.step(it)
    assert executor.plans[0].is_fused
    assert sequence.deferred == pytest.approx(executor.now - alone)


def test_who_arrives_during_training_was_deferred_by_it() -> None:
    it, executor = world()
    it.training.add("job", micro_batches(it, rows=3000))
    executor.step(it)
    now = executor.now
    for arrival, deferred in [(now - 0.004, 0.004), (-5.0, now), (now, 0.0)]:
        assert it.requests.submit(request(arrival=arrival), now).deferred == pytest.approx(deferred)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(first_token=9.0), 1),
        (SLO(first_token=1e-3), 0),
        (SLO(between_tokens=1e-3), 0),
        (SLO(end_to_end=1e-3), 0),
        (SLO(first_token=9.0, between_tokens=9.0, end_to_end=9.0, deferral=9.0), 1),
        (SLO(slowdown=1.0), 1),
    ],
)
def test_bounds_kept_and_broken_are_counted(slo: SLO, met: int) -> None:
    it, executor = world()
    it.requests.submit(request(slo=slo), 0.0)
    drain(it, executor)
    assert (it.stats.slo_met, it.stats.slo_missed) == (met, 1 - met)


@pytest.mark.parametrize(("slowdown", "met"), [(1.01, 0), (1000.0, 1)])
def test_the_slowdown_of_answers_is_counted(slowdown: float, met: int) -> None:
    """This one waits for the step under way, which trains, and then for what its bound leaves to training."""
    it, executor = world()
    it.training.add("job", micro_batches(it, rows=3000))
    executor.step(it)
    sequence = it.requests.submit(request(arrival=0.0, slo=SLO(slowdown=slowdown)), executor.now)
    while not sequence.is_finished:
        executor.step(it)
    inference = sum(CostModel().predict(replace(plan, training=())) for plan in executor.plans[1:])
    assert it.stats.answer_seconds == pytest.approx(executor.now)
    assert it.stats.answer_deferred_seconds == pytest.approx(executor.now - inference, rel=0.05)
    assert it.stats.slowdown == pytest.approx(executor.now / inference, rel=0.1)
    assert (it.stats.slo_met, it.stats.slo_missed) == (met, 1 - met)


def test_the_cost_model_learns_from_each_step() -> None:
    it, _ = world()
    executor = ScriptedExecutor(4, seconds=lambda plan: 0.2)
    it.requests.submit(request(answer=200), 0.0)
    drain(it, executor)
    assert executor.plans[150].predicted == pytest.approx(0.2, rel=0.05)
    assert it.cost.error < 0.05


def test_what_steps_with_a_share_take_teaches_nothing_of_the_whole_machine() -> None:
    it, _ = world(policy="spatial:0.25")
    executor = ScriptedExecutor(4, seconds=lambda plan: 0.2)
    before = it.cost.first.learned
    it.requests.submit(request(answer=20), 0.0)
    it.training.add("job", micro_batches(it, rows=4000))
    for _ in range(40):
        executor.step(it)
    assert {plan.share for plan in executor.plans} == {0.25}
    assert it.cost.first.learned == replace(before, interference=it.cost.first.learned.interference) != before
    assert (it.stats.fused_steps, it.stats.finished) == (0, 1)


def test_a_share_is_predicted_to_take_longer_than_alone() -> None:
    alone, _ = world()
    alone.requests.submit(request(), 0.0)
    it, _ = world(policy="spatial")
    it.requests.submit(request(), 0.0)
    it.training.add("job", micro_batches(it))
    it.cost.first.interference.inference, it.cost.first.interference.training = 3.0, 1.5
    assert it.plan(0.0).only.predicted == pytest.approx(3 * alone.plan(0.0).only.predicted)


def test_a_plan_pauses_only_where_it_does_nothing_and_somebody_waits() -> None:
    it, executor = world(policy="enhanced-temporal:2,5")
    assert it.plan(1.0).only.idle == 0.0
    first = it.requests.submit(request(answer=2, arrival=1.0), 1.0)
    plan = it.plan(2.5).only
    assert plan.is_empty and plan.idle == pytest.approx(3.5)
    it.requests.cancel(first.key)
    assert it.plan(2.5).only.idle == 0.0
    for _ in range(2):
        it.requests.submit(request(answer=2, arrival=2.5), 2.5)
    plan = it.plan(2.5).only
    assert len(plan.inference) == 2 and plan.idle == 0.0
    apply(it, executor.run(plan), 3.0)
    assert executor.now == pytest.approx(plan.predicted)


def test_nothing_to_do_is_an_empty_plan() -> None:
    it, executor = world()
    assert it.plan(0.0).only.is_empty and not it.has_work
    it.plan(0.0)
    assert apply(it, executor.run(BasePlan()), 0.0) == []
    assert it.stats.steps == 0


@pytest.mark.parametrize("name", ["layers", "max_running", "quantum", "min_prefill_rows"])
def test_settings_out_of_range(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.{name} is out of its range: 0"):
        world(**{name: 0})
