"""The learned seconds of a page of the second tier."""

import pytest

from coserve.schedule.swap_tier import Rate


@pytest.mark.parametrize("slower", [3.0, 400.0])
def test_a_slow_tier_is_known_from_its_first_step(slower: float) -> None:
    """One that is learned in small pieces would be left as soon as it is barely too slow."""
    rate = Rate(1e-3)
    rate.observe(8, 8 * slower * 1e-3, now=5.0)
    assert rate.seconds(5.0) == pytest.approx(slower * 1e-3)
    assert rate.seconds(65.0) == pytest.approx(max(slower / 2, 1.0) * 1e-3)


def test_a_later_step_far_slower_teaches_as_one_four_times_slower() -> None:
    rate = Rate(1e-3)
    rate.observe(1, 1e-3, now=0.0)
    rate.observe(1, 1.0, now=0.0)
    assert rate.seconds(0.0) == pytest.approx(1e-3 + (4e-3 - 1e-3) / 4)
