import pytest

from coserve.core.request import Request
from coserve.core.sequence import MicroBatch, Sequence
from coserve.errors import ConfigError
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import POLICIES, View, make_policy, register
from coserve.schedule.policies.base import INFINITE, NO_TRAINING

CONFIG = SchedulerConfig(layers=4, max_positions=64)


def view(requests: int = 0, batches: int = 1, **changes: object) -> View:
    state: dict[str, object] = {
        "now": 0.0,
        "config": CONFIG,
        "cost": CostModel(),
        "waiting": tuple(Sequence(key, Request("r", (1,))) for key in range(requests)),
        "running": (),
        "training": tuple(MicroBatch(100 + n, "job", "a@0", (8,), 4) for n in range(batches)),
        "updates": (),
        "finished": 0,
    }
    return View(**(state | changes))  # type: ignore[arg-type]


def test_policies_are_found_by_name() -> None:
    assert {"hybrid", "temporal"} <= POLICIES.keys()
    assert type(make_policy("hybrid")) is POLICIES["hybrid"]
    with pytest.raises(ConfigError, match=r"no policy 'fifo'.*hybrid, temporal"):
        make_policy("fifo")
    with pytest.raises(ConfigError, match="does not take"):
        make_policy("hybrid", n=3)
    with pytest.raises(ConfigError, match="not 0"):
        make_policy("temporal", n=0)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two policies"):
        register("hybrid")(POLICIES["hybrid"])


def test_hybrid_runs_a_quantum_alone_and_at_least_something() -> None:
    allowance = make_policy("hybrid").allow(view())
    assert (allowance.seconds, allowance.rows, allowance.minimum) == (CONFIG.quantum, 512, INFINITE)


@pytest.mark.parametrize(("slack", "seconds"), [(0.003, 0.003), (1.0, CONFIG.quantum_with_inference)])
def test_hybrid_rides_along_within_the_slack(slack: float, seconds: float) -> None:
    allowance = make_policy("hybrid").allow(view(1, inference_seconds=0.01, slack=slack, deferral=0.2))
    assert (allowance.seconds, allowance.minimum) == (seconds, 0.0)


def test_hybrid_feeds_the_starving_up_to_the_deferral_bound() -> None:
    asked = view(1, inference_seconds=0.01, slack=0.0, deferral=0.2, starving=True)
    allowance = make_policy("hybrid").allow(asked)
    assert (allowance.seconds, allowance.minimum) == (0.0, 0.2)


def test_hybrid_holds_nobody() -> None:
    policy, asked = make_policy("hybrid"), view(3)
    assert not policy.holds(asked)
    assert list(policy.admit(asked)) == list(asked.waiting)


def test_temporal_gives_training_the_machine_after_n_requests() -> None:
    policy = make_policy("temporal", n=2)
    assert not policy.holds(view(1, finished=1))
    assert policy.allow(view(1, finished=1)) == NO_TRAINING
    assert policy.holds(view(1, finished=2, batches=2))
    allowance = policy.allow(view(1, finished=2, batches=2))
    assert (allowance.seconds, allowance.rows, allowance.only) == (INFINITE, None, frozenset({100}))
    assert policy.holds(view(1, finished=9, batches=1))  # until that very micro-batch is done
    gone = view(1, finished=9, batches=0)
    assert not policy.holds(gone)
    assert not policy.holds(view(1, finished=10))
    assert policy.holds(view(1, finished=11))


def test_temporal_trains_when_nobody_is_there() -> None:
    assert make_policy("temporal").holds(view(0))
    assert not make_policy("temporal").holds(view(0, batches=0))


def test_temporal_lets_an_update_finish() -> None:
    policy = make_policy("temporal")
    asked = view(1, batches=0, updates=("job",))
    assert policy.holds(asked)
    assert policy.allow(asked).only == frozenset()
