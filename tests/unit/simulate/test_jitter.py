"""Deviation of steps: what is drawn has the stated mean and share."""

import random
from statistics import fmean

import pytest

from coserve.simulate.jitter import Jitter


def test_factors_have_the_stated_mean() -> None:
    source = random.Random(2)
    for jitter in (Jitter(), Jitter(0.3, 0.1, 3.0)):
        drawn = [jitter.draw(source) for _ in range(20_000)]
        assert fmean(drawn) == pytest.approx(jitter.mean, rel=0.02)
    assert all(Jitter(0.0, 0.0).draw(source) == 1.0 for _ in range(10))
