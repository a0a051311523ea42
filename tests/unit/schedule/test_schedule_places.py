"""Little's law against a count of who is there."""

import random

import pytest

from coserve.schedule.places import TAKEN, Places


def test_steps_of_the_longest_length_take_the_share_of_the_places() -> None:
    """Requests at random, answered step by step: on average as many are there as places may be taken."""
    draw, places, tokens, rate, now = random.Random(3), Places(), 20, 4.0, 0.0
    arrivals = sorted(draw.uniform(0.0, 200.0) for _ in range(int(200 * rate)))
    left: list[int] = []
    there: list[int] = []
    while now < 200.0:
        while arrivals and arrivals[0] <= now:
            places.arrived(arrivals.pop(0))
            left.append(tokens)
        now += min(places.longest_step(now, 40.0, tokens), 0.5)
        left = [one - 1 for one in left]
        for _ in range(left.count(0)):
            places.ended(now, tokens)
        left = [one for one in left if one]
        there.append(len(left))
    settled = there[len(there) // 3 :]
    assert sum(settled) / len(settled) == pytest.approx(TAKEN * 40, rel=0.2)


def test_answers_are_as_long_as_they_were_of_late() -> None:
    places = Places()
    assert places.longest_step(0.0, 10.0, 100.0) == float("inf")  # nobody comes
    for second in range(100):
        places.arrived(float(second))
        places.ended(float(second), 5)
    asked_for = places.longest_step(100.0, 10.0, 1000.0)
    assert asked_for < TAKEN * 10.0 / 5  # as if one of those that are there ended last
    assert places.longest_step(100.0, 10.0, 5.0) == pytest.approx(TAKEN * 10.0 / 5, rel=0.15)


def test_who_bears_a_step_does_not_press() -> None:
    places = Places()
    for second in range(40):
        places.arrived(float(second), presses=second % 4 == 0)
    assert places.rate(40.0) == pytest.approx(1.0, rel=0.1)
    assert places.pressing_rate(40.0) == pytest.approx(0.25, rel=0.3)
    assert places.pressing_rate(80.0) < 0.01
