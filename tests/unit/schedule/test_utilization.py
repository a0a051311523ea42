import random

import pytest

from coserve.schedule.slack import Utilization, own_slowdown


@pytest.mark.parametrize("busy", [0.0, 0.25, 1.0])
def test_the_share_of_time_that_rows_took(busy: float) -> None:
    it, now = Utilization(), 100.0
    it.observe(now, 0.0)
    for _ in range(500):
        now += random.uniform(0.001, 1.0)
        it.observe(now, 0.0)
    for _ in range(2000):  # what was before fades
        seconds = random.uniform(0.001, 1.0)
        now += seconds
        it.observe(now, busy * seconds)
    assert it.share == pytest.approx(busy, abs=1e-6)


def test_nothing_is_known_at_first_and_no_share_exceeds_all() -> None:
    it = Utilization()
    assert it.share == 0.0
    it.observe(5.0, 9.0)
    assert it.share == 0.0  # of no time
    it.observe(6.0, 9.0)
    assert it.share == 1.0


def test_an_idle_machine_gives_the_whole_slowdown_to_training_and_a_full_one_nothing() -> None:
    for slowdown in (1.0, 1.25, 2.0, 10.0, 1e17, 1e300):
        assert own_slowdown(slowdown, 0.0) == pytest.approx(slowdown)
        assert own_slowdown(slowdown, 1.0) == pytest.approx(1.0)
        assert 1.0 <= own_slowdown(slowdown, 0.7) <= own_slowdown(slowdown, 0.3) <= slowdown


def test_times_of_a_shared_machine_grow_by_the_slowdown() -> None:
    """Processor sharing: the mean time is work / (1 - utilization), training a user of the machine."""
    for utilization in (0.1, 0.5, 0.8):
        training = 1.0 - 1.0 / own_slowdown(1.5, utilization)
        assert (1.0 - utilization) / (1.0 - utilization - training) == pytest.approx(1.5)
