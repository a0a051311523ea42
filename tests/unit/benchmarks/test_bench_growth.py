"""The scheduler's work for a step, by the number of requests that wait: in calls, not in seconds."""

import sys
from types import FrameType

import pytest

from coserve.core.request import SLO
from coserve.schedule.policies import POLICIES
from coserve_benchmarks.simulation.growth import Backlog, growth

BOUNDS = {"first token": SLO(first_token=30.0), "answer": SLO(end_to_end=500.0, deferral=9.0), "none": SLO()}


def calls(waiting: int, policy: str, slo: SLO) -> int:
    """Calls of functions, Python's and C's, in three steps."""
    backlog, found = Backlog(waiting, policy, slo), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(3):
            backlog.step()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_calls_grow_no_faster_than_n_log_n(policy: str, bound: str) -> None:
    few, many = (calls(waiting, policy, BOUNDS[bound]) for waiting in (200, 2000))
    assert many <= few * 10 * 1.5  # log(2000) / log(200) is 1.43


def test_growth_is_stated_for_each_number() -> None:
    seconds, relative = growth((20, 200))
    assert seconds.keys() == {20, 200} and all(value > 0 for value in seconds.values())
    assert relative == pytest.approx(
        seconds[200] / seconds[20] / (200 * 5.298317 / (20 * 2.995732)), rel=1e-5
    )
