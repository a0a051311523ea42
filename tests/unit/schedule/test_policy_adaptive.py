"""Our own policy on a scripted clock: who is pushed out and until when, and what training does meanwhile."""

import random
from collections import deque
from dataclasses import replace

import pytest

from coserve.core.events import StepDone
from coserve.core.plan import OptimStep
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import Features
from coserve.schedule.policies import Policy, View, make_policy
from coserve.schedule.policies.base import INFINITE
from coserve.schedule.policies.entry import LatestEntry
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.training_queue import QueueEntry
from scripted_executor import ScriptedExecutor
from steps import step_costs
from timetable import COSTS, Ask, Tune, World, table

# A token takes a second, a micro-batch three (see `timetable`); of a quantum of 3 seconds one is too little
# to train in. Beside answers there is no training but what costs nothing: the way there, in the same pass.
SLOW = {"quantum": 3.0, "max_quantum": 3.0, "quantum_with_inference": 3.0, "slowdown": 1.0}
DEPTH = 4


def known_exactly(cost: StepCosts) -> StepCosts:
    """This machine does what is predicted, and nothing beside anything else."""
    for trains in (False, True) * 16:
        cost.misses.observe(1.0, trains)
    cost.first.interference.inference = cost.first.interference.training = 3.0
    return cost


def stated(seconds: float) -> float:
    """The bound that is planned with as so many seconds: a tenth of it is held back."""
    return seconds / 0.9


def play(asks: dict[str, Ask], tunes: dict[str, Tune], until: float) -> World:
    world = World(make_policy("adaptive"), asks, tunes, **SLOW)  # type: ignore[arg-type]
    known_exactly(world.it.cost)
    world.run(until)
    return world


# Until when


def test_a_request_is_pushed_out_until_its_first_token_would_be_late() -> None:
    world = play({"x": Ask(0.5, 2, SLO(first_token=stated(10)))}, {"a": Tune()}, until=14)
    assert world.lines == table("""
        0  train a
        3  train a            # x could wait 6.5 seconds more: until 10.5, less 1 for its prompt
        6  train a            # 3.5
        9  prefill x          # 0.5
        10 decode x, train a  # the way there
        11 train a            # and back
        13 train a
    """)
    assert world.sequences["x"].first_token_at == 10


@pytest.mark.parametrize(
    ("slo", "tokens"),
    [
        (SLO(first_token=stated(10.0)), 3),  # 1 second for its prompt
        (SLO(end_to_end=stated(12.0)), 3),  # 3 for all of it
        (SLO(end_to_end=stated(10.0)), 1),
        (SLO(deferral=stated(9.0)), 3),  # what it takes itself does not count
        (SLO(first_token=stated(10.0), end_to_end=stated(30.0)), 9),  # the first of its bounds counts
        (SLO(first_token=stated(50.0), end_to_end=stated(18.0)), 9),
        (SLO(first_token=stated(50.0), end_to_end=stated(40.0), deferral=stated(9.0)), 9),
    ],
)
def test_each_of_its_bounds_says_until_when(slo: SLO, tokens: int) -> None:
    """All of these leave 9 seconds from its arrival on, and at most one of them is left as it enters."""
    world = play({"x": Ask(0.5, tokens, slo)}, {"a": Tune()}, until=30)
    x = world.sequences["x"]
    assert x.admitted_at == 9 and x.is_finished
    assert x.first_token_at is not None and x.last_token_at is not None
    assert slo.first_token is None or x.first_token_at - 0.5 <= slo.first_token
    assert slo.end_to_end is None or x.last_token_at - 0.5 <= slo.end_to_end
    assert slo.deferral is None or x.deferred <= slo.deferral


@pytest.mark.parametrize(
    ("slo", "lines"),
    [
        (SLO(end_to_end=stated(11)), ["9 prefill x y z", "10 decode x, train a"]),
        # Its first token does not wait for their prompts, which pass beside its second one.
        (SLO(first_token=stated(10)), ["9 prefill x", "10 decode x, prefill y z, train a"]),
        (
            SLO(first_token=stated(10), between_tokens=1.1),
            ["9 prefill x", "10 decode x, prefill y z, train a"],
        ),
        # Beside it they would make that one late.
        (SLO(first_token=stated(10), between_tokens=0.9), ["9 prefill x y z", "10 decode x, train a"]),
    ],
)
def test_the_first_who_is_due_takes_everybody_along(slo: SLO, lines: list[str]) -> None:
    asks = {
        "x": Ask(0.5, 2, slo),
        "y": Ask(2, 1, SLO(end_to_end=stated(100))),
        "z": Ask(8.9, 1, SLO(deferral=60)),
    }
    world = play(asks, {"a": Tune()}, until=11)
    assert world.lines[3:] == lines


def test_who_is_as_urgent_goes_along_at_once() -> None:
    asks = {
        "x": Ask(0.5, 2, SLO(first_token=stated(10))),
        "y": Ask(2, 1, SLO(end_to_end=stated(100))),
        "z": Ask(1, 1, SLO(first_token=stated(9.4))),  # due before x, and asked later
    }
    assert play(asks, {"a": Tune()}, until=10).lines[3:] == ["9 prefill z x"]


def test_who_states_no_bound_enters_at_once_and_takes_everybody_along() -> None:
    asks = {
        "x": Ask(0.5, 1, SLO(end_to_end=stated(100))),
        "y": Ask(3.5, 1),
        "z": Ask(5, 1, SLO(end_to_end=stated(100))),
    }
    world = play(asks, {"a": Tune()}, until=12)
    assert [world.sequences[name].admitted_at for name in "xyz"] == [4, 4, None]


def test_without_a_job_nobody_is_pushed_out() -> None:
    asks = {"x": Ask(0.5, 1, SLO(end_to_end=stated(100))), "y": Ask(5, 1, SLO(deferral=100))}
    assert play(asks, {}, until=50).lines == ["0.5 prefill x", "5 prefill y", "6 end"]


def test_nobody_is_pushed_out_after_the_last_job() -> None:
    asks = {"x": Ask(0.5, 1, SLO(end_to_end=stated(100))), "y": Ask(20, 1, SLO(end_to_end=stated(100)))}
    world = play(asks, {"a": Tune(removed=5.5)}, until=50)
    assert [world.sequences[name].admitted_at for name in "xy"] == [6, 20]


# One question at a time


def config(**changes: float) -> SchedulerConfig:
    return SchedulerConfig(
        layers=2,
        max_positions=64,
        **({"quantum": 1.0, "max_quantum": 10.0, "quantum_with_inference": 10.0} | changes),
    )  # type: ignore[arg-type]


def asked(
    key: int, tokens: int = 4, slo: SLO = SLO(end_to_end=stated(1000.0)), at: float = 0.0, output: int = 0
) -> Sequence:
    """Somebody who wants so many tokens more than the `output` that is there."""
    request = Request(str(key), (1,), SamplingParams(max_tokens=tokens + output), slo=slo, arrival=at)
    return Sequence(key, request, output=[7] * output)


def view(
    waiting: tuple[Sequence, ...] = (),
    running: tuple[Sequence, ...] = (),
    now: float = 0.0,
    **changes: object,
) -> View:
    batches = deque([MicroBatch(100, "a", "a@0", (40, 60), 2), MicroBatch(101, "a", "a@0", (30,), 2)])
    jobs = (QueueEntry("a", 1.0, OptimStep("a"), batches),)
    state = View(now, config(), known_exactly(step_costs(COSTS)), waiting, running, jobs, finished=0)
    return replace(state, **changes)  # type: ignore[arg-type]


def keys(policy: Policy, state: View) -> list[int]:
    return [sequence.key for sequence in policy.admit(state)]


@pytest.mark.parametrize("admitted", [None, 3.0])
def test_an_answer_that_has_begun_goes_on_at_once(admitted: float | None) -> None:
    """Begun in another engine, or here before it lost its pages."""
    begun = asked(2, output=3)
    begun.admitted_at = admitted
    policy = make_policy("adaptive")
    assert keys(policy, view((asked(1),))) == []
    assert keys(policy, view((asked(1), begun))) == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "shared", "first_token", "joins"),
    [
        (10, 8, 7.8, True),  # 2 steps of its own < 10 / (1 + 3.9)
        (10, 8, 8.3, False),  # 2 > 10 / (1 + 4.15)
        (10, 2, 0.5, True),  # 8 < 10 / (1 + 0.25)
        (10, 2, 0.6, False),  # 8 > 10 / (1 + 0.3)
        (10, 10, 900.0, True),  # none of its own
        (5, 8, 900.0, True),
        (10, 0, 2.0, False),  # there is nobody to share with
    ],
)
def test_who_shares_enough_of_the_steps_under_way_joins(
    tokens: int, shared: int, first_token: float, joins: bool
) -> None:
    """It costs fewer steps of its own than its part of those that it would share later: with half a request a
    second, as many as that makes until it is due."""
    state = view(now=8.0, config=config(quantum=0.3))
    policy = make_policy("adaptive")
    assert keys(policy, replace(state, now=0.0, waiting=tuple(asked(key) for key in (1, 2, 3)))) == []
    late = asked(4, tokens, SLO(first_token=stated(first_token)), at=8.0)  # the fourth in 8 seconds
    running = (asked(5, shared, output=2), asked(6, 1, output=5)) if shared else ()
    assert keys(policy, replace(state, waiting=(late,), running=running)) == ([4] if joins else [])


def test_where_nobody_else_is_expected_everybody_joins() -> None:
    """The first request ever, but for the one that runs."""
    waiting = (asked(2, tokens=30),)
    assert keys(make_policy("adaptive"), view(waiting, (asked(1, tokens=2, output=1),))) == [2]


@pytest.mark.parametrize(("patience", "enters"), [(7.9, True), (8.1, False)])
def test_where_waiting_gathers_too_few_everybody_enters(patience: float, enters: bool) -> None:
    """Two requests in eight seconds, of which each could wait less than it takes for two more, or longer."""
    policy, slo = make_policy("adaptive"), SLO(deferral=stated(patience))
    assert keys(policy, view((asked(1, slo=slo),))) == []  # of one alone nothing is known
    assert keys(policy, view((asked(2, slo=slo, at=8.0),), now=8.0)) == ([2] if enters else [])


# How much


def seen(*patience: float) -> Policy:
    """A policy that has seen requests which could wait so many seconds each, alone; the last 32 count."""
    policy = make_policy("adaptive")
    for key, seconds in enumerate(patience, 1):  # 1 second for each prompt
        policy.admit(view((asked(key, slo=SLO(first_token=stated(seconds + 1.0))),)))
        policy.admit(view())
    return policy


@pytest.mark.parametrize(
    ("patience", "waited", "between", "seconds"),
    [
        (13.0, 0.0, None, 6.5),  # half of it
        (13.0, 0.0, 1.1, 6.5),
        (13.0, 0.0, 0.9, 6.0),  # less a second for the prompt of the one who waits, if it cannot follow
        (100.0, 0.0, None, 10.0),  # the longest one
        (1.5, 0.0, None, 1.0),  # a quantum at least
        (13.0, 11.0, None, 2.0),  # until it is due
    ],
)
def test_a_quantum_is_as_long_as_requests_are_patient(
    patience: float, waited: float, between: float | None, seconds: float
) -> None:
    policy = seen(*[patience] * 16)
    slo = SLO(first_token=stated(patience + 1.0), between_tokens=between)
    state = view((asked(99, slo=slo),), now=waited)
    assert keys(policy, state) == []
    assert policy.allow(state).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("bounds", "cut"),
    [
        ((), True),  # nothing is known of who may come
        ((SLO(),), True),  # wants its answer as soon as can be
        ((SLO(first_token=21.0),), False),  # a layer's second is less than a twentieth
        ((SLO(first_token=19.0),), True),
        ((SLO(end_to_end=21.0, deferral=30.0),), False),
        ((SLO(end_to_end=30.0, deferral=19.0),), True),
        ((SLO(end_to_end=19.0), *[SLO(end_to_end=30.0)] * 31), True),
        ((SLO(end_to_end=19.0), *[SLO(end_to_end=30.0)] * 32), False),  # that one is long ago
    ],
)
def test_windows_are_cut_where_a_layer_takes_too_long_for_who_may_come(
    bounds: tuple[SLO, ...], cut: bool
) -> None:
    policy = make_policy("adaptive")
    for key, slo in enumerate(bounds, 1):
        policy.admit(view((asked(key, slo=slo),)))
    assert policy.allow(view(config=config(quantum=0.9))).cut is cut
    assert not policy.allow(view(config=config(quantum=1.0))).cut  # it fits


@pytest.mark.parametrize(
    ("bound", "waited", "enters"),
    [(21.0, 18.9, False), (21.0, 19.1, True), (15.0, 13.6, False), (15.0, 13.8, True)],
)
def test_who_cannot_wait_for_a_layer_more_enters(bound: float, waited: float, enters: bool) -> None:
    """Its prompt takes a second and a layer another; where windows are cut a third of a quantum is left."""
    state = view((asked(1, slo=SLO(first_token=stated(bound))),), config=config(quantum=0.9), now=waited)
    assert keys(make_policy("adaptive"), state) == ([1] if enters else [])


def test_of_few_requests_little_is_concluded() -> None:
    found = [seen(*[100.0] * count).allow(view()).seconds for count in (0, 1, 4, 8, 16, 32)]
    assert found == pytest.approx([1.0, 1.0, 2.5, 5.0, 10.0, 10.0])


def test_the_least_patient_of_late_counts() -> None:
    assert seen(*[40.0] * 16, 12.0, 30.0).allow(view()).seconds == pytest.approx(6.0)
    assert seen(*[40.0] * 16, 0.0).allow(view()).seconds == 1.0  # who cannot wait has no patience
    assert seen(12.0, *[16.0] * 31).allow(view()).seconds == pytest.approx(6.0)
    assert seen(12.0, *[16.0] * 32).allow(view()).seconds == pytest.approx(8.0)  # that one is long ago


@pytest.mark.parametrize("inference", [0.0, 1.0])
@pytest.mark.parametrize(("largest", "rows"), [(64, 100), (512, 512)])
def test_a_window_may_be_a_whole_micro_batch(inference: float, largest: int, rows: int) -> None:
    state = view(config=replace(config(), max_training_rows=largest), inference_seconds=inference, slack=5.0)
    assert make_policy("adaptive").allow(state).rows == rows


@pytest.mark.parametrize("slack", [0.0, 0.25, 4.0, 50.0])
@pytest.mark.parametrize("starving", [False, True])
@pytest.mark.parametrize("whole", [1.2, 1.3])
def test_beside_answers_training_has_what_their_bounds_leave(
    slack: float, starving: bool, whole: float
) -> None:
    """Its windows are cut where it starves and a layer's second is more than four fifths of what is left."""
    state = view(inference_seconds=1.0, slack=slack, whole_slack=whole, deferral=3.0, starving=starving)
    found, theirs = make_policy("adaptive").allow(state), make_policy("hybrid").allow(state)
    assert found == replace(theirs, rows=512, coming=0.0, cut=starving and whole == 1.2)


@pytest.mark.parametrize(
    ("patience", "row", "alone", "rides"),
    [
        (40.0, 1.0, 0.0, False),  # a pass takes 1 second, a mini-batch of 100 rows 203
        (40.0, 0.05, 0.0, True),  # 1 of 13
        (40.0, 1.0, 1.4, False),
        (40.0, 1.0, 1.5, True),  # so long it had no time of its own
        (0.0, 1.0, 0.0, True),  # nobody waits for anybody
    ],
)
def test_beside_who_has_waited_training_rides_where_that_saves_something(
    patience: float, row: float, alone: float, rides: bool
) -> None:
    policy = seen(*[patience] * 16)
    policy.allow(view())  # it has the machine now
    costs = known_exactly(step_costs(COSTS | {"forward_rows": row, "window_rows": row, "backward_rows": row}))
    state = view(now=alone, cost=costs, inference_seconds=1.0, slack=4.0)
    assert (policy.allow(state).seconds > 0.0) is rides


def interfering(inference: float, training: float) -> StepCosts:
    """A machine on which both take beside each other so many times as long as each kind of work alone, and a
    mini-batch of 100 rows a hundred times as long as a pass."""
    cost = known_exactly(step_costs(COSTS | {"backward_rows": 1.0}))
    cost.first.interference.inference, cost.first.interference.training = inference, training
    return cost


@pytest.mark.parametrize(
    ("factors", "slack", "whole", "deferral", "left", "piece"),
    [
        ((1.5, 1.5), 0.5, 9.0, 99.0, 4, 4 * 1.5 / 1.5),  # as long as its last 4 tokens take beside training
        ((1.5, 2.0), 0.5, 9.0, 99.0, 4, 4 * 1.5 / 2.0),
        ((1.5, 1.5), 50.0, 50.0, 99.0, 20, 16.0),  # 16 of them at most
        # What its bound leaves for all of them is enough for some, of which a fifth is kept.
        ((1.5, 1.5), 0.4, 5.0, 99.0, 20, 8.0),
        ((1.5, 1.5), 0.4, 2.5, 99.0, 20, 4.0),
        ((1.5, 1.5), 0.4, 2.4, 99.0, 20, None),  # not even for 4
        ((1.5, 1.5), 0.4, 1.3, 99.0, 2, 2.0),  # but that is the rest
        ((1.5, 1.5), 0.5, 9.0, 5.0, 20, 8.0),  # the bound on all its deferral likewise
        ((1.5, 1.5), 0.5, 9.0, 2.4, 20, None),
        ((0.9, 1.5), 0.0, 0.0, 99.0, 4, None),  # of nothing there is nothing to spend
        ((0.9, 1.5), 0.0, 0.1, 99.0, 4, 4 * 1.0 * 0.9 / 1.5),  # what takes no longer costs nothing
        (
            (2.6, 2.7),
            50.0,
            50.0,
            99.0,
            4,
            4 * 2.6 / 2.7,
        ),  # what looks like a loss may be a machine become slower
        ((2.7, 2.7), 50.0, 50.0, 99.0, 4, None),  # this does not
    ],
)
def test_training_runs_beside_answers_where_bounds_bear_it(
    factors: tuple[float, float], slack: float, whole: float, deferral: float, left: int, piece: float | None
) -> None:
    state = view(
        running=(asked(1, tokens=left),), cost=interfering(*factors), inference_seconds=1.0, slack=slack,
        whole_slack=whole, deferral=deferral, config=replace(config(), quantum_with_inference=1.0),
    )  # fmt: skip
    found = make_policy("adaptive").allow(state)
    assert found.share == (None if piece is None else 0.5)
    expected = (pytest.approx(piece), INFINITE, 512, False)
    assert piece is None or (found.seconds, found.minimum, found.rows, found.cut) == expected


def test_there_is_no_share_beside_prompts_nor_where_riding_saves_more() -> None:
    cost, busy = interfering(1.5, 1.5), {"inference_seconds": 1.0, "slack": 9.0}
    prompt = Sequence(2, Request("2", (1, 1), SamplingParams(max_tokens=4)))
    assert make_policy("adaptive").allow(view(running=(asked(1), prompt), cost=cost, **busy)).share is None
    cheap = step_costs(
        COSTS | {"forward_rows": 0.05, "window_rows": 0.05, "backward_rows": 0.05}
    )  # a pass is 1 of 13 seconds
    cheap.first.interference.inference = cheap.first.interference.training = 1.5
    assert make_policy("adaptive").allow(view(running=(asked(1),), cost=cheap, **busy)).share is None


def test_sharing_that_gained_nothing_is_tried_again() -> None:
    policy, cost = make_policy("adaptive"), interfering(1.5, 1.5)
    state = view(running=(asked(1),), cost=cost, inference_seconds=1.0, slack=9.0)
    assert policy.allow(state).share == 0.5
    cost.first.interference.inference = cost.first.interference.training = 3.0
    tried = [now for now in range(1, 25) if policy.allow(replace(state, now=float(now))).share]
    assert tried == [10, 20]


def test_who_is_answered_beside_training_enters_sooner() -> None:
    """Its 4 tokens take 6 seconds then, not 4, and it is held up by 2 of them."""
    for slo, late in ((SLO(end_to_end=stated(50.0)), 46.0), (SLO(deferral=stated(50.0)), 50.0)):
        for cost, left in ((interfering(3.0, 3.0), late), (interfering(1.5, 1.5), late - 2.0)):
            policy, due = make_policy("adaptive"), []
            for now in (left - 0.4, left - 0.2):  # a third of a quantum before it at last
                one = asked(1, slo=slo)
                one.deferred = now  # it has waited for training all the time
                due.append(keys(policy, view((one,), now=now, cost=cost)))
            assert due == [[], [1]], (slo, left)


# On a machine like a real one, which does exactly what is predicted


def make_scheduler(policy: str, slower: float = 3.0) -> Scheduler:
    settings = SchedulerConfig(layers=DEPTH, max_positions=1024, starvation=None)
    it = Scheduler(BaseCache(settings, PagePool(2048, 16)), CostModel(), make_policy(policy))
    known_exactly(it.cost)
    it.cost.first.interference.start(slower, slower)
    return it


def give(it: Scheduler, job: str, weight: float = 1.0) -> None:
    """The next optimizer step: two micro-batches of 384 rows."""
    batches = [MicroBatch(it.new_key(), job, f"{job}@0", (384,), DEPTH) for _ in range(2)]
    it.training.add(job, batches, weight)


def step(it: Scheduler, executor: ScriptedExecutor, weights: dict[str, float] | None = None) -> None:
    for event in executor.step(it):
        if isinstance(event, StepDone):
            give(it, event.job, (weights or {}).get(event.job, 1.0))


def test_training_is_put_down_between_layers() -> None:
    """No step without answers takes longer than a quantum, though a micro-batch takes many of them."""
    it, executor = make_scheduler("adaptive"), ScriptedExecutor(16)
    give(it, "a")
    iteration = it.cost.first.predict_iteration([MicroBatch(0, "a", "a@0", (384,), DEPTH)])
    while executor.now < 5.0:
        step(it, executor)
    assert iteration > 8 * it.config.quantum
    assert max(result.seconds for result in executor.results) <= it.config.quantum
    spans = {len(segment.span) for plan in executor.plans for segment in plan.training}
    assert min(spans) < DEPTH and it.stats.updates > 2


@pytest.mark.parametrize("rate", [0.0, 3.0])
def test_several_jobs_share_by_weight(rate: float) -> None:
    it, executor = make_scheduler("adaptive"), ScriptedExecutor(16)
    weights = {"heavy": 3.0, "light": 1.0}
    for job, weight in weights.items():
        give(it, job, weight)
    coming = deque(traffic("weights", rate, 90.0, "end_to_end")) if rate else deque()
    while executor.now < 90.0:
        while coming and coming[0].arrival <= executor.now:
            it.requests.submit(coming.popleft(), executor.now)
        step(it, executor, weights)
    rows = dict.fromkeys(weights, 0.0)
    for plan in executor.plans:
        for segment in plan.training:
            rows[segment.job] += segment.length * len(segment.span)
    assert rows["heavy"] / rows["light"] == pytest.approx(3.0, rel=0.1)


def alone(prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds until a request's first token and between two of them, with nobody else there."""
    first, next_ = Features(), Features()
    first.add_inference(0, max(prompt, 2), 1, None)
    next_.add_inference(prompt + tokens, 1, 1, None)
    return CostModel().predict_features(first), CostModel().predict_features(next_)


def traffic(seed: str, rate: float, seconds: float, kind: str) -> list[Request]:
    """Poisson arrivals of all lengths; bounds are 4 to 10 times what a request takes alone, and some room."""
    draws, made, at = random.Random(seed), [], 0.0
    while (at := at + draws.expovariate(rate)) < seconds:
        prompt, tokens = draws.randint(4, 64), draws.randint(4, 24)
        first, between = alone(prompt, tokens)
        times = draws.uniform(4, 10)
        slo = {
            "end_to_end": SLO(end_to_end=times * (first + (tokens - 1) * between) + 0.3),
            "tokens": SLO(first_token=times * first + 0.3, between_tokens=draws.uniform(3, 6) * between),
            "deferral": SLO(deferral=draws.uniform(0.2, 2.0)),
            "none": SLO(),
        }
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        which = draws.choice([*slo]) if kind == "mixed" else kind
        made.append(Request(str(len(made)), (1,) * prompt, sampling, slo=slo[which], arrival=at))
    return made


def serve(
    policy: str, requests: list[Request], seconds: float, slower: float = 3.0
) -> tuple[list[Sequence], float, ScriptedExecutor]:
    """All requests, answered, the rows that were trained within so many seconds, and who ran all that."""
    it, executor = make_scheduler(policy, slower), ScriptedExecutor(16)
    give(it, "a")
    coming, sequences, trained = deque(requests), [], 0.0
    while executor.now < seconds or coming or not all(sequence.is_finished for sequence in sequences):
        while coming and coming[0].arrival <= executor.now:
            sequences.append(it.requests.submit(coming.popleft(), executor.now))
        step(it, executor)
        if executor.now < seconds:
            trained = it.stats.backward_rows
    return sequences, trained, executor


def broken(sequence: Sequence) -> list[str]:
    """The bounds that an answer did not keep."""
    slo, at = sequence.request.slo, sequence.request.arrival
    assert sequence.first_token_at is not None and sequence.last_token_at is not None
    took = {
        "first_token": sequence.first_token_at - at,
        "between_tokens": sequence.slowest,
        "end_to_end": sequence.last_token_at - at,
        "deferral": sequence.deferred,
    }
    bounds = {name: getattr(slo, name) for name in took}
    return [name for name, bound in bounds.items() if bound is not None and took[name] > bound + 1e-9]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["end_to_end", "tokens", "deferral", "mixed"])
@pytest.mark.parametrize("rate", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("slower", [2.0, 3.0])  # what they take here, or so much that there are none
def test_every_bound_is_kept(kind: str, rate: float, slower: float) -> None:
    for seed in range(4):
        sequences, _, executor = serve("adaptive", traffic(f"{kind}/{seed}", rate, 10.0, kind), 10.0, slower)
        assert any(plan.share for plan in executor.plans) is (slower == 2.0)
        missed = {sequence.request.id: broken(sequence) for sequence in sequences}
        assert not any(missed.values()), missed


def test_pushing_requests_out_leaves_more_to_training() -> None:
    """Than answering each at once: where whole answers are wanted in time, and few of them."""
    ours = theirs = 0.0
    for seed in range(2):
        requests = traffic(f"few/{seed}", 1.0, 40.0, "end_to_end")
        ours += serve("adaptive", requests, 40.0)[1]
        theirs += serve("hybrid", requests, 40.0)[1]
    assert ours >= 1.02 * theirs


def test_a_prompt_enters_earlier_where_training_beside_it_may_make_it_longer() -> None:
    """On half of the machine its rows take twice as long, as its steps do."""
    asked = Request("x", (1,) * 100, SamplingParams(max_tokens=4), slo=SLO(first_token=1000.0))
    state = view((Sequence(1, asked),), cost=known_exactly(step_costs()))
    alone, beside = (LatestEntry(state, slowness).until_entry(Sequence(1, asked)) for slowness in (1.0, 2.0))
    assert alone < 900.0
    assert 900.0 - beside == pytest.approx(2 * (900.0 - alone))
