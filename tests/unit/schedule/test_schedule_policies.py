from collections import deque
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import coserve.schedule.policies
from coserve.core.plan import OptimStep
from coserve.core.request import SLO, Request
from coserve.core.sequence import MicroBatch, Sequence
from coserve.errors import ConfigError
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.policies import POLICIES, Allowance, Policy, View, make_policy, register
from coserve.schedule.policies.base import INFINITE, NO_TRAINING
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.training_queue import QueueEntry
from steps import step_costs
from timetable import Ask, Tune, play, table

CONFIG = SchedulerConfig(layers=4, max_positions=64)


def job(batches: int = 1, steps: int = 0, is_due: bool = False) -> QueueEntry:
    training = deque(MicroBatch(100 + n, "job", "a@0", (8,), 4) for n in range(batches))
    return QueueEntry("job", 1.0, OptimStep("job"), training, is_due, steps=steps)


def view(requests: int = 0, jobs: tuple[QueueEntry, ...] | None = None, **changes: object) -> View:
    state: dict[str, object] = {
        "now": 0.0,
        "config": CONFIG,
        "cost": step_costs(),
        "waiting": tuple(Sequence(key, Request("r", (1,))) for key in range(requests)),
        "running": (),
        "jobs": (job(),) if jobs is None else jobs,
        "finished": 0,
    }
    return View(**(state | changes))  # type: ignore[arg-type]


def test_policies_are_found_by_name() -> None:
    assert POLICIES.keys() >= {
        "continuous", "deferred", "enhanced-temporal", "hybrid",
        "idle-only", "postpone-all", "spatial", "temporal",
    }  # fmt: skip
    for name in POLICIES:
        assert type(make_policy(name)) is POLICIES[name]
    with pytest.raises(ConfigError, match=r"no policy 'fifo'.*hybrid, idle-only"):
        make_policy("fifo")
    with pytest.raises(ConfigError, match="does not take"):
        make_policy("hybrid", n=3)
    with pytest.raises(ConfigError, match="not 0"):
        make_policy("temporal", n=0)


class Told(Policy):
    """Remembers what it was built with."""

    def __init__(self, n: int = 1, grain: str = "whole", share: float = 0.5) -> None:
        self.options = (n, grain, share)

    def allow(self, view: View) -> Allowance:
        return NO_TRAINING


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("told", (1, "whole", 0.5)),
        ("told:", (1, "whole", 0.5)),
        ("told:5", (5, "whole", 0.5)),
        ("told:5,half", (5, "half", 0.5)),
        ("told:5,half,0.25", (5, "half", 0.25)),
        ("told:share=1e-3", (1, "whole", 0.001)),
        ("told:5,share=2,grain=x", (5, "x", 2.0)),
    ],
)
def test_options_are_written_behind_the_name(written: str, options: tuple[object, ...]) -> None:
    with patch.dict(POLICIES, told=Told):
        policy = make_policy(written)
    assert isinstance(policy, Told) and policy.options == options
    assert [type(option) for option in policy.options] == [type(option) for option in options]


@pytest.mark.parametrize(
    ("written", "more", "message"),
    [
        ("told:5,x,0.5,7", {}, r"takes 3 options \(n, grain, share\), not '7' too"),
        ("told:seed=7", {}, "'told' does not take the option 'seed'; it takes n, grain, share"),
        ("told:5", {"n": 6}, "'told' is given its n twice"),
        ("told:n=5,n=6", {}, "'told' is given its n twice"),
        ("told:grain=x,y", {}, "'told' is given its grain twice"),
        ("hybrid:5", {}, "'hybrid' needs chosen or fused or interleaved for windows, not '5'"),
        ("idle-only:5", {}, "policy 'idle-only' takes 0 options, not '5' too"),
        ("idle-only:n=5", {}, "'idle-only' does not take the option 'n'; it takes none"),
        ("temporal:x", {}, "'temporal' needs a whole number for n, not 'x'"),
        ("temporal", {"n": "x"}, "'temporal' needs a whole number for n, not 'x'"),
        ("temporal:batch=2.5", {}, "'temporal' needs a whole number for batch, not '2.5'"),
        ("temporal:grain=x", {}, "'temporal' needs request or batch for grain, not 'x'"),
        ("spatial:x", {}, "'spatial' needs a number for share, not 'x'"),
        ("deferred:1,together=maybe", {}, "'deferred' needs true or false for together, not 'maybe'"),
        ("enhanced-temporal:2,x", {}, "'enhanced-temporal' needs a number for delay, not 'x'"),
        (":5", {}, "no policy ''"),
    ],
)
def test_options_that_are_refused(written: str, more: dict[str, object], message: str) -> None:
    with patch.dict(POLICIES, told=Told), pytest.raises(ConfigError, match=message):
        make_policy(written, **more)


@pytest.mark.parametrize("written", ["isolated", "isolated:2"])
def test_isolation_is_a_topology(written: str) -> None:
    with pytest.raises(
        ConfigError, match=r"not a policy of one engine: run one server for answers and one for"
    ):
        make_policy(written)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two policies"):
        register("hybrid")(POLICIES["hybrid"])


def test_a_policy_is_one_class_with_a_name() -> None:
    """The scheduler takes whatever is registered: here one that answers two at a time and trains at noon."""
    with patch.dict(POLICIES):

        @register("noon")
        class Noon(Policy):
            def __init__(self, noon: float = 12.0) -> None:
                self.noon = noon

            def admit(self, view: View) -> tuple[Sequence, ...]:
                return view.waiting[: 2 - len(view.running)]

            def allow(self, view: View) -> Allowance:
                return Allowance(INFINITE, None) if view.now >= self.noon else NO_TRAINING

            def wake(self, view: View) -> float:
                return self.noon

        asks = {"x": Ask(0, 2), "y": Ask(0, 1), "z": Ask(0, 2)}
        assert play("noon:2", asks, {"a": Tune(steps=1)}) == table("""
            0  prefill x y
            1  decode x, prefill z
            2  decode z, train a     # a step of both takes as long as the training in it
            3  train a
            5  end
        """)
    assert "noon" not in POLICIES


def test_every_file_of_policies_is_found_without_being_named() -> None:
    """A new strategy is a new file: no list of them is kept anywhere."""
    folder = Path(coserve.schedule.policies.__file__).parent
    registering = {path.stem for path in folder.glob("*.py") if "@register(" in path.read_text()}
    assert registering - {"base"} == {policy.__module__.rpartition(".")[2] for policy in POLICIES.values()}
    sources = [path.read_text() for path in (folder.parent.glob("*.py"))] + [
        (folder / "__init__.py").read_text()
    ]
    named = {stem for stem in registering - {"base"} for text in sources if f"policies.{stem} import" in text}
    assert not named


def test_hybrid_runs_a_quantum_alone_and_at_least_something() -> None:
    allowance = make_policy("hybrid").allow(view())
    assert (allowance.seconds, allowance.rows, allowance.minimum) == (CONFIG.quantum, 512, INFINITE)


@pytest.mark.parametrize(("slack", "seconds"), [(0.003, 0.003), (1.0, CONFIG.quantum_with_inference)])
def test_hybrid_rides_along_within_the_slack(slack: float, seconds: float) -> None:
    allowance = make_policy("hybrid").allow(view(1, inference_seconds=0.01, slack=slack, deferral=0.2))
    assert (allowance.seconds, allowance.minimum, allowance.job) == (seconds, 0.0, None)


def streamed() -> StepCosts:
    cost = step_costs()
    cost.first.reads.start([1, 3], 10, rate=1e9)
    return cost


PATIENT = Sequence(0, Request("r", (1,), slo=SLO(deferral=60.0)))
PROMPT = Sequence(1, Request("r", (1,)))
BOUND = Sequence(2, Request("r", (1,), slo=SLO(deferral=60.0, first_token=9.0)))


@pytest.mark.parametrize(
    ("changes", "is_long"),
    [
        ({}, True),
        ({"starving": True}, True),
        ({"waiting": (PATIENT, PROMPT)}, False),
        ({"running": (PATIENT, BOUND)}, False),
        ({"interruptible": False}, False),
        ({"cost": streamed()}, False),
    ],
)
def test_hybrid_trains_as_long_beside_answers_that_bear_it_as_alone(
    changes: dict[str, object], is_long: bool
) -> None:
    state = {
        "running": (PATIENT,),
        "interruptible": True,
        "window_rows": 2048,
        "inference_seconds": 0.01,
        "arrivals": 0.5,
    }
    asked = view(0, **(state | {"slack": 9.0, "deferral": 9.0} | changes))
    allowance = make_policy("hybrid").allow(asked)
    if not asked.cost.first.reads.layers:
        assert allowance.seconds == (CONFIG.max_quantum if is_long else CONFIG.quantum_with_inference)
    expected = (True, 0.5, 2048) if is_long else (False, None, 512)
    assert (allowance.abandons, allowance.arrivals, allowance.rows) == expected
    assert allowance.minimum == (9.0 if "starving" in changes else 0.0)
    assert make_policy("hybrid").allow(replace(asked, slack=0.2)).seconds <= 0.2
    few = replace(asked, config=replace(CONFIG, max_training_rows=128))
    assert make_policy("hybrid").allow(few).rows == 128


def test_hybrid_feeds_the_starving_up_to_the_deferral_bound() -> None:
    asked = view(1, inference_seconds=0.01, slack=0.0, deferral=0.2, starving=True)
    allowance = make_policy("hybrid").allow(asked)
    assert (allowance.seconds, allowance.minimum) == (0.0, 0.2)


@pytest.mark.parametrize("name", ["hybrid", "spatial"])
def test_those_who_do_both_at_once_hold_nobody(name: str) -> None:
    policy, asked = make_policy(name), view(3)
    assert not policy.holds(asked)
    assert list(policy.admit(asked)) == list(asked.waiting)


@pytest.mark.parametrize(("share", "inference"), [(0.25, 0.001), (0.5, 0.001), (0.8, 0.001), (0.5, 0.05)])
def test_spatial_training_is_a_piece_of_its_share(share: float, inference: float) -> None:
    """Sixteen steps, or a quantum of its share, in seconds of the whole machine; a shorter one alone."""
    quantum = CONFIG.quantum_with_inference * (1 - share)
    seconds = max(quantum, 16 * inference / share * (1 - share))
    policy, cost = make_policy("spatial", share=share), step_costs()
    cost.first.interference.inference, cost.first.interference.training = 1 / share, 1 / (1 - share)
    allowance = policy.allow(view(1, cost=cost, inference_seconds=inference, slack=0.0))
    assert allowance.seconds == pytest.approx(seconds)
    assert (allowance.rows, allowance.minimum, allowance.job) == (512, INFINITE, None)
    assert not allowance.cut
    alone = policy.allow(view(0, cost=cost))
    assert alone.seconds == pytest.approx(quantum * CONFIG.quantum / CONFIG.quantum_with_inference)
    assert allowance.share == alone.share == share
    assert make_policy("hybrid").allow(view(1, inference_seconds=0.01)).share is None


def test_temporal_gives_training_the_machine_after_n_requests() -> None:
    policy = make_policy("temporal", n=2, grain="batch")
    assert not policy.holds(view(1, finished=1))
    assert policy.allow(view(1, finished=1)) == NO_TRAINING
    assert policy.holds(view(1, (job(2),), finished=2))
    allowance = policy.allow(view(1, (job(2),), finished=2))
    assert (allowance.seconds, allowance.rows, allowance.job) == (INFINITE, None, "job")
    assert policy.holds(view(1, (job(1),), finished=9))  # until that very optimizer step is done
    assert not policy.holds(view(1, (job(steps=1),), finished=9))
    assert policy.allow(view(1, (job(steps=1),), finished=9)) == NO_TRAINING
    assert not policy.holds(view(1, (job(steps=1),), finished=10))
    assert policy.holds(view(1, (job(steps=1),), finished=11))
    assert not policy.holds(view(1, (), finished=11))  # it went away


def test_temporal_gives_a_job_the_machine_to_its_end() -> None:
    policy = make_policy("temporal", n=2)
    assert policy.holds(view(1, finished=2))
    for steps in range(5):
        assert policy.holds(view(1, (job(steps=steps),), finished=2))
        assert policy.allow(view(1, (job(steps=steps),), finished=2)).job == "job"
    assert not policy.holds(view(1, (), finished=2))
    assert not policy.holds(view(1, finished=3))
    assert policy.holds(view(1, finished=4))


def test_temporal_trains_when_nobody_is_there() -> None:
    assert make_policy("temporal").holds(view(0))
    assert not make_policy("temporal").holds(view(0, ()))


@pytest.mark.parametrize("grain", ["batch", "request"])
def test_temporal_lets_an_update_finish(grain: str) -> None:
    policy = make_policy("temporal", grain=grain)
    assert policy.holds(view(0))
    asked = view(1, (job(0, is_due=True),))
    assert policy.holds(asked)
    assert policy.allow(asked).job == "job"
