"""Costs of products and rates, as learned."""

import math
import random

import pytest

from coserve.split.costs import ProductCost, RecentRate


def test_a_cost_is_that_of_what_was_measured() -> None:
    draws = random.Random()
    fixed, per_row = draws.uniform(1e-4, 1e-2), draws.uniform(1e-6, 1e-4)
    cost = ProductCost()
    assert cost.seconds(5) == 0.0
    for _ in range(100):
        rows = draws.choice((1, 4, 32, 500))
        cost.observe(rows, (fixed + rows * per_row) * draws.uniform(0.95, 1.05))
    for rows in (1, 100, 1000):
        assert cost.seconds(rows) == pytest.approx(fixed + rows * per_row, rel=0.2)
    for _ in range(200):  # the machine is half as fast now
        rows = draws.choice((1, 4, 32, 500))
        cost.observe(rows, 2 * (fixed + rows * per_row))
    for rows in (1, 100, 1000):
        assert cost.seconds(rows) == pytest.approx(2 * (fixed + rows * per_row), rel=0.2)


def test_of_one_row_count_others_are_taken_to_be_no_longer() -> None:
    cost = ProductCost()
    for _ in range(3):
        cost.observe(100, 0.5)
    assert cost.seconds(100) == cost.seconds(1000) == pytest.approx(0.5)
    assert cost.seconds(1) == pytest.approx(0.005)
    assert cost.shared(100) == cost.seconds(100)


def test_what_company_spares_is_the_part_that_rows_do_not_add() -> None:
    cost = ProductCost()
    assert cost.shared(5) == 0.0
    for _ in range(20):
        cost.observe(1, 0.0011)
        cost.observe(1000, 0.101)
    assert cost.shared(1) == cost.shared(1000) == pytest.approx(0.001, rel=0.05)


def test_no_part_of_a_cost_is_negative() -> None:
    for few, many in ((2.0, 1.0), (0.001, 1.0)):
        cost = ProductCost()
        for _ in range(10):
            cost.observe(1, few)
            cost.observe(100, many)
        assert cost.fixed >= 0 and cost.per_row >= 0
        assert 0 < cost.seconds(1) <= cost.seconds(100) <= 2 * many


def test_an_outlier_teaches_little() -> None:
    cost = ProductCost()
    for _ in range(20):
        cost.observe(1, 0.001)
        cost.observe(100, 0.002)
    cost.observe(1, 60.0)  # the process was stopped
    assert cost.seconds(1) < 0.0015 and cost.seconds(100) < 0.003


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate, now = RecentRate(), 100.0
    assert rate.a_second(now) == 0.0
    for _ in range(600):
        now += 0.1
        rate.add(50, now)
    assert rate.total == 30_000
    assert rate.a_second(now) == pytest.approx(500, rel=0.02)
    assert rate.a_second(now + 10) == pytest.approx(500 / math.e, rel=0.02)
    assert rate.a_second(now + 1000) < 1e-6
