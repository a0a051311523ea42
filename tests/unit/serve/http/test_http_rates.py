"""Token buckets against a plain account of every token, on a clock of the test's own."""

import random
from fractions import Fraction

import pytest

from coserve.serve.http.rates import TokenBuckets


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_as_in_a_plain_account(seed: int) -> None:
    draw, now = random.Random(seed), [Fraction(1000)]
    most = draw.choice((1, 2, 7, 60, 500))
    rates = TokenBuckets(most, lambda: float(now[0]))
    tokens, counted = {"a": Fraction(most), "b": Fraction(most)}, now[0]
    for _ in range(1000):
        now[0] += Fraction(draw.choice((0, 0, 0, 1, 10, 1000)) * draw.randrange(1, 100), 16 * most)
        for name, held in tokens.items():
            tokens[name] = min(held + (now[0] - counted) * most / 60, Fraction(most))
        counted, name = now[0], draw.choice("ab")
        missing = float(max(1 - tokens[name], 0) * 60 / most)
        told = rates.take(name)
        assert told == pytest.approx(missing, abs=1e-5)
        assert (told == 0) == (missing <= 1e-6)
        tokens[name] -= told == 0


def test_what_is_kept_is_bounded_and_the_newest_stay() -> None:
    draw, rates = random.Random(0), TokenBuckets(1, lambda: 0.0, entries=50)
    for number in range(1000):
        rates.take(f"{draw.randrange(10**9)}")
        assert number == 0 or rates.wait("guest") or rates.take("guest") == 0
        assert len(rates) <= 50
    assert TokenBuckets(0).take("x") == 0 and not len(TokenBuckets(0))
