"""Latency added by training: quanta, bounds, deferral, starvation (FlexLLM 6.2, FineInfer 3.2)."""

from itertools import pairwise
from random import Random

import pytest

from coserve.core.events import StepDone
from coserve.core.plan import BasePlan, TrainingSegment
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule import training_queue
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.training_queue import starved
from scripted_executor import ScriptedExecutor
from steps import step_plan

DEPTH = 16


class World:
    """A hybrid scheduler with endless training, on a machine that behaves exactly as predicted."""

    def __init__(self, **config: object) -> None:
        settings: dict[str, object] = {"layers": DEPTH, "max_positions": 4096} | config
        self.config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        self.it = Scheduler(BaseCache(self.config, PagePool(2048, 16)), CostModel(), make_policy("hybrid"))
        for trains in (False, True) * 16:
            self.it.cost.misses.observe(1.0, trains)  # this machine does what is predicted
        self.executor = ScriptedExecutor(16)
        self.more_training()

    def more_training(self, rows: int = 1024) -> None:
        batches = [MicroBatch(self.it.new_key(), "job", "job@0", (rows // 2,) * 2, DEPTH) for _ in range(2)]
        self.it.training.add("job", batches)

    def step(self) -> BasePlan:
        if any(isinstance(event, StepDone) for event in self.executor.step(self.it)):
            self.more_training()
        return self.executor.plans[-1]

    def submit(self, slo: SLO, prompt: int = 40, answer: int = 30, arrival: float | None = None) -> Sequence:
        arrival = self.executor.now if arrival is None else arrival
        request = Request("r", tuple(range(prompt)), SamplingParams(max_tokens=answer), "a@1", slo, arrival)
        return self.it.requests.submit(request, self.executor.now)

    def rows_trained(self) -> float:
        return self.it.stats.kept_rows + self.it.stats.backward_rows


def test_training_alone_goes_in_quanta_and_uses_them() -> None:
    world = World()
    lasted = []
    for _ in range(200):
        world.step()
        lasted.append(world.executor.results[-1].seconds)
    assert max(lasted) <= world.config.quantum + 1e-9
    assert sum(lasted) / 200 > 0.6 * world.config.quantum


def test_who_arrives_waits_at_most_one_quantum() -> None:
    for steps in range(1, 60, 7):
        world = World()
        for _ in range(steps):
            before = world.executor.now
            world.step()
        sequence = world.submit(SLO(first_token=0.0), arrival=before + 1e-6)
        plan = world.step()
        assert [segment.key for segment in plan.inference] == [sequence.key]
        assert sequence.first_token_at is not None and not plan.training
        assert sequence.first_token_at - before <= world.config.quantum + plan.predicted + 1e-9


def test_a_layer_that_takes_longer_than_a_quantum_still_runs() -> None:
    world = World(quantum=1e-4, micro_batches_in_flight=1)
    first = world.step()
    assert [(s.length, len(s.span)) for s in first.training] == [(world.config.min_training_rows, 1)]
    for _ in range(200):
        world.step()
    assert world.rows_trained() > 0


@pytest.mark.parametrize("bound", [0.03, 0.05])
def test_tokens_come_within_their_bound_and_training_uses_the_rest(bound: float) -> None:
    world = World(quantum_with_inference=1.0)
    sequences = [world.submit(SLO(between_tokens=bound), answer=150) for _ in range(8)]
    for _ in range(20):
        world.step()
    lasted = []
    for _ in range(100):
        world.step()
        lasted.append(world.executor.results[-1].seconds)
    assert max(sequence.slowest for sequence in sequences) <= bound + 1e-9
    assert sum(lasted) / 100 > 0.75 * bound
    assert world.it.stats.fused_steps >= 100


def test_a_wrong_model_costs_bounds_only_until_it_has_learned() -> None:
    world = World(quantum_with_inference=1.0)
    world.executor = ScriptedExecutor(16, seconds=lambda plan: 2.5 * CostModel().predict(plan))
    learning = world.submit(SLO(between_tokens=0.06), answer=100)
    while not learning.is_finished:
        world.step()
    sequences = [world.submit(SLO(between_tokens=0.06), answer=100) for _ in range(4)]
    while not sequences[-1].is_finished:
        world.step()
    assert learning.slowest > 0.06
    assert max(sequence.slowest for sequence in sequences) <= 0.06
    assert world.it.stats.fused_steps > 100


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_come_within_their_bound_although_the_host_takes_time_too(ahead: int) -> None:
    """The executor's clock does not see planning, delivering, or a core that another process has taken."""
    draw = Random(1)
    world = World(quantum_with_inference=1.0)
    world.executor = ScriptedExecutor(16, plans_ahead=ahead, host=lambda: draw.uniform(0.004, 0.006))
    learning = world.submit(SLO(between_tokens=0.05), answer=60)
    while not learning.is_finished:
        world.step()
    sequences = [world.submit(SLO(between_tokens=0.05), answer=100) for _ in range(4)]
    begun = world.executor.now
    while not sequences[-1].is_finished:
        world.step()
    assert max(sequence.slowest for sequence in sequences) <= 0.05
    assert (world.executor.now - begun) / 100 > 0.7 * 0.05  # and training has the rest


def test_the_end_comes_by_its_deadline_although_the_host_takes_time_too() -> None:
    world = World(quantum_with_inference=1.0)
    world.executor = ScriptedExecutor(16, host=lambda: 0.01)
    learning = world.submit(SLO(between_tokens=0.2), answer=100)
    while not learning.is_finished:
        world.step()
    begun = world.executor.now
    sequence = world.submit(SLO(end_to_end=3.0), answer=60)
    while not sequence.is_finished:
        world.step()
    assert 2.0 < world.executor.now - begun <= 3.0


def test_a_larger_bound_trains_more() -> None:
    trained = []
    for bound in (0.02, 0.03, 0.05, 0.08):
        world = World(quantum_with_inference=1.0)
        world.submit(SLO(between_tokens=bound), answer=200)
        while world.executor.now < 3.0:
            world.step()
        trained.append(world.rows_trained())
    assert trained == sorted(trained) and trained[-1] > 2 * trained[0]


def test_the_first_token_comes_by_its_deadline() -> None:
    world = World(quantum_with_inference=1.0, max_prefill_rows=64)
    sequence = world.submit(SLO(first_token=0.5), prompt=600)
    while sequence.first_token_at is None:
        world.step()
    assert sequence.first_token_at <= 0.5 + 1e-9
    assert world.it.stats.fused_steps > 0


def test_the_end_comes_by_its_deadline() -> None:
    world = World(quantum_with_inference=1.0)
    sequence = world.submit(SLO(end_to_end=2.0), answer=60)
    while not sequence.is_finished:
        world.step()
    assert 1.0 < world.executor.now <= 2.0 + 1e-9
    assert world.it.stats.slo_met == 1 and world.it.stats.fused_steps > 50


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.2])
def test_all_deferral_together_keeps_its_bound(bound: float) -> None:
    world = World(starvation=0.1)
    sequences = [world.submit(SLO(deferral=bound), answer=100) for _ in range(3)]
    while not sequences[-1].is_finished:
        world.step()
    assert max(sequence.deferred for sequence in sequences) <= bound + 1e-9
    assert all(sequence.deferred > 0.8 * bound - 1e-9 for sequence in sequences)


def test_training_never_starves_at_an_impossible_bound() -> None:
    world = World(starvation=0.2)
    for _ in range(30):
        world.step()  # windows chosen while nobody was there are larger than any slack now
    before, begun = world.rows_trained(), world.executor.now
    world.submit(SLO(between_tokens=0.0), answer=400)
    world.step()  # before its first token no bound between two of them applies
    trained = []
    for _ in range(300):
        plan = world.step()
        if plan.training:
            trained.append(world.executor.now)
            assert len(plan.training) == 1 and len(plan.training[0].span) == 1
    assert world.rows_trained() > before
    gaps = [b - a for a, b in zip([begun, *trained], trained, strict=False)]
    assert 0.2 <= max(gaps[1:]) <= 0.2 + 0.1
    assert len(trained) == pytest.approx((world.executor.now - begun) / 0.2, rel=0.3)


def test_small_windows_of_one_job_do_not_starve_a_large_one_of_another() -> None:
    world = World(starvation=0.2, quantum=0.15, quantum_with_inference=0.2, micro_batches_in_flight=1)
    world.it.training.remove("job")
    large = MicroBatch(world.it.new_key(), "job", "job@0", (512,), DEPTH)
    world.it.training.add("job", [large])
    while large.direction is not Direction.BACKWARD or not large.is_paused:
        world.step()  # alone: a window of all 512 rows, put down on its way back
    world.it.training.add("small", [MicroBatch(world.it.new_key(), "small", "s@0", (3000,), DEPTH)])
    world.submit(SLO(between_tokens=0.022), answer=500)
    world.step()
    lying, times = list(large.paused), []
    for _ in range(150):
        plan = world.step()
        if any(segment.key == large.key for segment in plan.training):
            times.append(world.executor.now)
    assert {segment.key for plan in world.executor.plans[-150:] for segment in plan.training} > {large.key}
    assert large.paused != lying or large.done
    assert max(b - a for a, b in pairwise(times)) <= 0.2 + 0.1


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds after which a job counts as starved: some hundred steps, as a scheduler's step takes a
    millisecond to plan."""
    monkeypatch.setattr(training_queue, "STARVED", 2.0)
    return 2.0


def test_a_job_that_gets_nothing_beside_requests_says_since_when(soon: float) -> None:
    world = World(starvation=None)
    queue = world.it.training
    for _ in range(30):
        world.step()
    assert starved(queue, "job") is None
    flood = world.submit(SLO(between_tokens=0.0), answer=3000)
    told: list[tuple[float, tuple[float, str] | None]] = [(0.0, None)]  # when it changed, and to what

    def look() -> None:
        if starved(queue, "job") != told[-1][1]:
            told.append((world.executor.now, starved(queue, "job")))

    last = 0.0
    while world.executor.now < 3 * soon:
        before = world.executor.now
        last = before if world.step().training else last
        look()
    assert told[1:] == [
        (pytest.approx(last + soon, abs=0.1), (last, "requests"))
    ]  # once, with its last piece
    world.it.requests.cancel(flood.key)
    resumed = world.executor.now
    while world.executor.now < 6 * soon:
        world.step()
        look()
    assert told[2:] == [(pytest.approx(resumed, abs=0.1), None)]  # no request is there to blame
    world.it.training.remove("job")
    assert starved(queue, "job") is None


def test_a_job_behind_another_ones_steps_blames_no_request() -> None:
    world = World()
    queue = world.it.training
    queue.add("other", [MicroBatch(world.it.new_key(), "other", "o@0", (8,), DEPTH)])
    queue.remove("job")
    queue.add("late", [MicroBatch(world.it.new_key(), "late", "l@0", (8,), DEPTH)])
    for now in (0.0, 5.0, 10.0, 15.0):
        queue.turns(now, None)
        (batch,) = queue._jobs["other"].ready(queue.in_flight)
        segment = TrainingSegment(
            batch.key, "other", "o@0", 0, 8, 1, Direction.TRAIN_FORWARD, batch.next_span(1), DEPTH
        )
        queue.planned(step_plan(BasePlan(training=(segment,))), now)
    queue.turns(16.0, None)
    assert starved(queue, "late") == (0.0, "jobs") and starved(queue, "other") is None


def test_a_piece_now_and_then_neither_ends_starving_nor_begins_it_anew(soon: float) -> None:
    world, seen = World(starvation=1.5 * soon), set[tuple[float, str] | None]()
    for _ in range(30):
        world.step()
    flood = world.submit(SLO(between_tokens=0.0), answer=3900)
    while world.executor.now < 6 * soon and not flood.is_finished:
        world.step()
        seen.add(starved(world.it.training, "job"))
    assert world.executor.now > 3.5 * soon and len(seen) == 2


def test_no_starvation_bound_means_no_exception() -> None:
    world = World(starvation=None)
    world.submit(SLO(between_tokens=0.0), answer=300)
    for _ in range(300):
        world.step()
    assert world.rows_trained() == world.it.stats.kept_rows <= 512  # one step before the first token


def test_the_wait_for_a_new_engine_is_no_time_that_training_may_slow() -> None:
    """An answer that another engine began a minute ago: a slowdown of 1.5 would allow 30 s of training."""
    world = World()
    for _ in range(3):
        world.step()
    begun, arrival = world.executor.now, world.executor.now - 60.0
    sampling, slo = SamplingParams(max_tokens=60), SLO(slowdown=1.5)
    request = Request("r", (1,) * 40, sampling, None, slo, arrival, continued=(1, 2, 3))
    sequence = world.it.requests.submit(request, begun)
    before = sequence.deferred
    while not sequence.is_finished:
        world.step()
    taken, trained = world.executor.now - begun, sequence.deferred - before
    assert 0.2 < trained / taken < 1.0 - 1.0 / 1.55
    assert 1.25 < world.it.stats.slowdown < 1.55
    assert world.it.stats.slo_met == 1


def test_who_states_nothing_shares_the_machine_evenly() -> None:
    world = World(slowdown=2.0)
    sequence = world.submit(SLO(), answer=200)
    while not sequence.is_finished:
        world.step()
    assert 0.35 < sequence.deferred / world.executor.now <= 0.5 + 1e-9
