"""Hybrid co-serving (FlexLLM, 6.2) and spatial sharing (3 and 8.3), by hand, on a machine known exactly."""

import pytest

from coserve.core.request import SLO
from coserve.core.sequence import Direction
from coserve.errors import ConfigError
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.policies import View, make_policy
from coserve.schedule.policies.base import Allowance
from timetable import Ask, Tune, World

KEEP, LOSS, BACK = Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD
# A pass takes a second, and a row 1/16 there and 1/8 back; a layer of the two is a half of each.
PASSES = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {
    "forward_layers": 1.0,
    "forward_rows": 1 / 16,
    "window_rows": 1 / 16,
    "backward_rows": 1 / 8,
}
# The same, but what takes a second is a token, and a row's loss takes 1/64.
TOKENS = PASSES | {"forward_layers": 0.0, "tail_rows": 1.0, "loss_rows": 1 / 64}
WINDOWS = {"max_training_rows": 32, "min_training_rows": 4, "quantum_with_inference": 9.0}


def world(policy: str, costs: dict[str, float], asks: dict[str, Ask], **config: object) -> World:
    """One job of one optimizer step, 32 rows."""
    it = World(make_policy(policy), asks, {"a": Tune(steps=1, rows=32)}, costs=costs, **(WINDOWS | config))  # type: ignore[arg-type]
    for trains in (False, True) * 16:
        it.it.cost.misses.observe(1.0, trains)  # this machine does what is predicted
    return it


Row = tuple[float, int, list[tuple[Direction, int, int, int, int]]]


def steps(it: World) -> list[Row]:
    """Each step's beginning, its answering rows, and its windows: direction, rows, first and last layer."""
    now, rows = 0.0, []
    for plan, result in zip(it.executor.plans, it.executor.results, strict=True):
        windows = [
            (s.direction, s.start, s.start + s.length, s.span.first, s.span.last) for s in plan.training
        ]
        if plan.inference or windows:
            rows.append((now, len(plan.inference), windows))
        now += result.seconds
    return rows


def test_hybrid_fills_each_step_up_to_the_bound() -> None:
    """argmax f(c, s) <= SLO: with one decoding row f(1, s) = 1 + 1/16 + s, and the bound is two seconds.

    s is rows x layers / 32 there, and / 16 back: 15/16 of a second is left for it. Of two windows of equal
    work the one of more rows is taken.
    """
    it = world("hybrid", PASSES, {"x": Ask(0, 6, SLO(between_tokens=2.0))}, quantum=3.0, slowdown=2.0)
    it.run(until=60)
    assert steps(it) == [
        # No token before this one: as much training as answering, 17/16. 32 x 1 or 16 x 2 take 1.
        (0.0, 1, [(KEEP, 0, 32, 0, 1)]),
        # The other layer of the 32 takes 1 > 15/16, that of 16 of them 1/2.
        (2.0625, 1, [(KEEP, 0, 16, 1, 2)]),
        (3.625, 1, [(KEEP, 16, 32, 1, 2)]),
        (5.1875, 1, [(LOSS, 0, 32, 2, 3)]),  # takes no time here
        # 16 x 1 take 1 > 15/16, 8 x 1 and 4 x 2 take 1/2.
        (6.25, 1, [(BACK, 24, 32, 1, 2)]),
        (7.8125, 1, [(BACK, 24, 32, 0, 1)]),
        # Alone: a quantum is 3 seconds, and 24 x 2 take 3.
        (9.375, 0, [(BACK, 0, 24, 0, 2)]),
    ]
    assert it.sequences["x"].slowest <= 2.0
    assert it.lines[-1] == "12.375 end"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("seconds", "layers"), [(1.9, 1), (2.6, 2)])
def test_windows_are_apart_where_that_is_cheaper_and_take_what_was_predicted(
    seconds: float, layers: int, graphs: bool
) -> None:
    """A launched pass takes two seconds more than a replayed one. Apart a window through both layers takes 3
    seconds, through one 3/2; in the pass of the answer's row, which is launched for it, either takes 2."""
    costs = PASSES | {"prefill_layers": 2.0, "forward_rows": 1 / 64, "window_rows": 1 / 64}
    it = world("hybrid", costs, {"x": Ask(0, 12)}, quantum_with_inference=seconds, slowdown=8.0)
    truth = CostModel(costs)
    it.it.cost.first.graphs = truth.graphs = graphs
    it.executor._seconds = truth.predict
    it.run(until=200)
    carried = []
    for plan, result in zip(it.executor.plans, it.executor.results, strict=True):
        assert result.seconds == pytest.approx(plan.predicted)
        windows = [segment for segment in plan.training if segment.direction is KEEP]
        if plan.inference and windows:
            carried.append((windows[0].length, len(windows[0].span), bool(plan.fused)))
    # Without graphs one layer of two is launched where the window passes it: 1 + 1/4.
    assert carried == [(32, layers, not graphs or layers == 2)] * (2 // layers)


def test_hybrid_learns_that_pieces_are_cheaper_than_it_believed() -> None:
    """The smallest piece takes an eighth of a second and is believed to take two, twice the quantum, beside
    answers without bounds, of which there are always some."""
    overrated = PASSES | {"window_rows": 1.0, "backward_rows": 2.0}
    asks = {str(number): Ask(30 * number, 60) for number in range(12)}
    it = world("hybrid", overrated, asks, quantum_with_inference=1.0, slowdown=None)
    it.executor._seconds = CostModel(PASSES).predict
    it.run(until=400)
    trained = [place for place, plan in enumerate(it.executor.plans) if plan.training]
    assert trained[0] == 64, "slack may add up meanwhile"
    assert len(trained) > 3 and it.it.cost.first.weights["window_rows"] < 0.9


def test_hybrid_obeys_the_smallest_bound_in_the_step() -> None:
    """A second request that bears no training at all: there is none until it has its answer."""
    asks = {"x": Ask(0, 4, SLO(between_tokens=9.0)), "y": Ask(0, 3, SLO(between_tokens=1.0))}
    it = world("hybrid", PASSES, asks)
    it.run(until=8)
    assert [(answers, bool(windows)) for _, answers, windows in steps(it)[:4]] == [
        (2, True),  # no bound applies before the first token
        (2, False),  # 1 + 2/16 is more than y's bound by itself
        (2, False),
        (1, True),
    ]


def test_a_policy_is_told_what_bounds_leave_a_step_and_all_of_them() -> None:
    """Of ten seconds four tokens take 17/4: 23/4 are left, a quarter for each step or all for one."""
    it, told = world("hybrid", PASSES, {"x": Ask(0, 4, SLO(end_to_end=10.0))}), []
    policy, allow = it.it.policy, it.it.policy.allow

    def listening(view: View) -> Allowance:
        told.append((view.slack, view.whole_slack))
        return allow(view)

    policy.allow = listening  # type: ignore[method-assign]
    it.run(until=1)
    assert told[0] == (pytest.approx(23 / 16), pytest.approx(23 / 4))


def spatial(share: float, asks: dict[str, Ask], costs: dict[str, float] = TOKENS, **config: object) -> World:
    """Each stream is as much slower as its share is small, and that is known."""
    it = world(f"spatial:{share}", costs, asks, **config)
    it.it.cost.first.interference.inference, it.it.cost.first.interference.training = (
        1 / share,
        1 / (1 - share),
    )
    return it


def test_spatial_sharing_has_both_at_once_on_fixed_shares() -> None:
    """A token takes 17/16 of the whole machine, on half of it 17/8. Training has 9 seconds on the other half,
    4 1/2 of the whole machine, and no step of inference waits for its end."""
    it = spatial(0.5, {"x": Ask(0, 5)})
    it.run(until=60)
    assert steps(it) == [
        (0.0, 1, [(KEEP, 0, 32, 0, 2)]),  # 32 x 2 take 2 of the whole machine: until 4
        (2.125, 1, []),
        (4.25, 1, [(LOSS, 0, 32, 2, 3)]),  # 32 / 64: until 5.25
        (6.375, 1, [(BACK, 0, 32, 0, 2)]),  # 32 x 2 take 4: until 14.375
        (8.5, 1, []),  # ends at 10.625; what follows has the same half alone
    ]
    assert it.lines[-1] == "14.375 end"
    assert (it.it.cost.first.interference.inference, it.it.cost.first.interference.training) == (
        2.0,
        2.0,
    )  # nothing else was seen
    for plan, result in zip(it.executor.plans[:5], it.executor.results, strict=False):
        assert plan.share == 0.5 and not plan.fused and not plan.is_fused
        assert result.seconds == plan.predicted


def test_requests_that_come_meanwhile_do_not_wait_for_a_piece() -> None:
    it = spatial(0.5, {"x": Ask(0, 1), "y": Ask(7, 1)}, quantum=4.0)
    it.run(until=60)
    answered = [row[:2] for row in steps(it)]
    assert answered == [(0.0, 1), (4.0, 0), (5.0, 0), (9.0, 1)]  # alone a piece is waited for
    it = spatial(0.5, {"x": Ask(0, 5), "y": Ask(7, 1)})
    it.run(until=60)
    assert (8.5, 2, []) in steps(it)  # in the midst of the way back


def test_training_beside_answers_pays_for_its_own_pass_over_the_weights() -> None:
    """A pass takes 1 second, 32 rows through both layers 2: on half of the machine until 6."""
    it = spatial(0.5, {"x": Ask(0, 9)}, PASSES, quantum_with_inference=0.0)
    it.run(until=60)
    assert steps(it)[:5] == [
        (0.0, 1, [(KEEP, 0, 32, 0, 2)]),  # 6 of 16 steps' 34
        (2.125, 1, []),
        (4.25, 1, []),
        (6.375, 1, [(LOSS, 0, 32, 2, 3)]),  # takes no time here
        (8.5, 1, [(BACK, 0, 32, 0, 2)]),
    ]
    for plan, result in zip(it.executor.plans[:5], it.executor.results, strict=False):
        assert result.seconds == plan.predicted


def test_without_a_job_there_is_no_share() -> None:
    it = World(make_policy("spatial:0.25"), {"x": Ask(0, 3)}, {}, costs=TOKENS)
    it.run(until=60)
    assert it.sequences["x"].last_token_at == 3 * (1 + 1 / 16)
    assert all(plan.share is None for plan in it.executor.plans)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("quantum", [0.0, 3.0])
def test_training_takes_sixteen_steps_or_a_quantum_of_its_share(share: float, quantum: float) -> None:
    """Both layers of a window in one piece where they fit, else one after the other; it is not cut."""
    it = spatial(share, {"x": Ask(0, 60)}, TOKENS | {"tail_rows": 1 / 8}, quantum_with_inference=quantum)
    it.run(until=90)
    room = max(16 * (1 / 8 + 1 / 16) / share, quantum) * (1 - share)
    found: dict[Direction, set[tuple[int, int, int]]] = {KEEP: set(), LOSS: set(), BACK: set()}
    for _, answers, windows in steps(it):
        for way, start, end, first, last in windows if answers else ():
            found[way].add((start, end, last - first))
    seconds = {KEEP: 32 / 16, BACK: 32 / 8}  # of both layers
    assert found == {way: {(0, 32, 2 if seconds[way] <= room else 1)} for way in seconds} | {
        LOSS: {(0, 32, 1)}
    }


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_stream_with_nothing_to_do_leaves_its_share_idle(share: float) -> None:
    """A job alone is as slow as beside requests: that is what makes the share a fixed one."""
    it = spatial(share, {})
    it.run(until=200)
    work = 32 / 16 + 32 / 64 + 32 / 8  # a second for 16 rows there, for the loss of 64, for 8 back
    assert float(it.lines[-1].removesuffix(" end")) == pytest.approx(work / (1 - share))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_a_share_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        make_policy("spatial", share=share)
