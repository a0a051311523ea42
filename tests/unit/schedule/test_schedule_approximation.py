"""The rule by which an approximation answers, on loads written down by hand."""

import math

import pytest

from coserve.schedule.approximation import ApproximationRule, StepLoad, VersionOutlook

RULE = ApproximationRule(bound=0.1)
IDLE, FULL = StepLoad(3, 8), StepLoad(7, 8)
THERE = VersionOutlook()
NEVER = VersionOutlook(math.inf, 0.0, True)


def late(seconds: float, compute: float = 0.0) -> VersionOutlook:
    """A version that has to be read, for which others leave or are read first."""
    return VersionOutlook(seconds, compute, True)


@pytest.mark.parametrize(
    ("versions", "load", "chosen"),
    [
        ([THERE, THERE], IDLE, 0),
        ([THERE, THERE], FULL, 0),
        ([VersionOutlook(9.0), THERE], IDLE, 0),  # it fits, and nobody is in its way
        ([VersionOutlook(9.0), THERE], FULL, 1),
        ([late(0.1), THERE], IDLE, 0),
        ([late(0.11), late(0.05), THERE], IDLE, 1),
        ([late(0.3), late(0.2), late(0.15)], IDLE, 2),
        ([late(0.3), late(0.2), late(0.2)], IDLE, 1),  # of two that are as late, the more accurate one
        ([NEVER, late(5.0), late(7.0)], IDLE, 1),
        ([NEVER, NEVER, NEVER], FULL, 0),  # who has to wait anyway waits for the exact one
        ([VersionOutlook(0.0, 0.2), VersionOutlook(0.0, 0.1), THERE], IDLE, 0),
        ([VersionOutlook(0.0, 0.2), VersionOutlook(0.0, 0.1), THERE], FULL, 1),
        ([late(0.05, 0.06), late(0.05, 0.05)], FULL, 1),
        ([late(0.05, 0.06), late(0.05, 0.05)], IDLE, 0),
        ([late(0.5)], FULL, 0),
    ],
)
def test_the_most_accurate_version_within_the_bound(
    versions: list[VersionOutlook], load: StepLoad, chosen: int
) -> None:
    assert RULE.choose(versions, load) == chosen


def test_a_load_that_grows_and_goes() -> None:
    """The exact version of an application would make each answer 0.2 s longer, one chain 0.05 s."""
    versions = [VersionOutlook(0.0, 0.2), VersionOutlook(0.0, 0.05), THERE]
    first, places = 10.0, 4  # seconds on the clock when somebody began to wait; sequences at once
    story = ((10.0, 1, 0), (10.05, 2, 0), (10.08, 3, 1), (10.1, 2, 0), (10.15, 2, 1), (11.0, 3, 1))
    for now, taken, chosen in story:
        assert RULE.choose(versions, StepLoad(taken, places, now - first)) == chosen, now
    assert RULE.choose(versions, StepLoad(0, places)) == 0
    assert ApproximationRule(0.0).choose(versions, StepLoad(3, places)) == 2
    assert ApproximationRule(math.inf).choose([late(1e9), THERE], StepLoad(3, places)) == 0
