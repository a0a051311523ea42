"""Limits on the moves of one plan: what the moves before take counts, and steps have a margin."""

import random
from collections.abc import Mapping

import pytest

from coserve.core.plan import SwapIn, SwapOut
from coserve.core.request import BASE, SLO, Request, SamplingParams
from coserve.core.sequence import Sequence, SwapCopy
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.features import StepFeatures
from coserve.schedule.newcomers import INFINITE
from coserve.schedule.swap_tier import SwapTier
from coserve.schedule.swapping import Swapping, longest_moves
from steps import step_costs

SIZES = {"base": 3, "other": 7}  # bytes of a page, by base


def planned(draw: random.Random, tier: SwapTier, swapping: Mapping[str, Swapping]) -> float:
    """Plans some moves of either base; the seconds that they take."""
    seconds = 0.0
    for number in range(draw.randrange(5)):
        base, pages = draw.choice(list(SIZES)), tuple(range(draw.randint(1, 6)))
        if draw.random() < 0.5:
            swapping[base].copies.moves.out[number] = SwapOut(number, pages)
            seconds += len(pages) * SIZES[base] * tier.writing.guess
        else:
            swapping[base].copies.moves.back[number] = SwapIn(number, pages)
            seconds += len(pages) * SIZES[base] * tier.reading.guess
    return seconds


@pytest.mark.parametrize("seed", range(8))
def test_a_move_has_the_time_that_the_moves_planned_before_it_leave(seed: int) -> None:
    """A copy that is written follows all moves so far, and is read in a plan of its own. One that is read
    follows all moves so far."""
    draw, cost = random.Random(seed), CostModel()
    found, decided = set[bool](), 0
    for _ in range(100):
        tier = SwapTier(10_000)
        tier.writing.guess, tier.reading.guess = draw.uniform(1e-5, 1e-3), draw.uniform(1e-5, 1e-3)
        swapping = {base: Swapping(cost, 200, tier, nbytes) for base, nbytes in SIZES.items()}
        before, pages, base = planned(draw, tier, swapping), draw.randint(1, 6), draw.choice(list(SIZES))
        writing, reading = (pages * SIZES[base] * rate.guess for rate in (tier.writing, tier.reading))
        near = draw.choice([writing, reading, before + writing, before + reading])
        tier.begin(0.0, near * draw.uniform(0.7, 1.4))
        sequence = Sequence(1, Request("r", (1,) * 2000), computed=draw.randint(10, 2000))
        again = added_seconds(cost, 0, sequence.computed)
        is_worth = before + writing <= tier.limit and reading <= tier.limit and writing + reading < again
        has_time = before + reading <= tier.limit
        assert swapping[base].is_worth(sequence, 0, pages, 0.0) is is_worth
        assert swapping[base].has_time(SwapCopy(9, 0, pages, 1), 0.0) is has_time
        found |= {is_worth, has_time}
        decided += max(writing, reading) <= tier.limit < before + writing
    assert len(found) == 2 and decided > 5, "the moves before decide in many cases"


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_moves_let_a_step_that_takes_its_margin_longer_keep_every_bound(seed: int) -> None:
    """Bisection finds the most seconds of moves that end, together with the rows of all running sequences,
    before the first bound, where both take longer by the widest margin."""
    draw, config, decided = random.Random(seed), SchedulerConfig(2, 4096), 0
    cost = step_costs()
    for _ in range(100):
        cost.misses.observe(draw.uniform(0.9, 1.6), trains=False)
    for _ in range(40):
        running, now = [sequence(draw, key) for key in range(draw.randint(1, 5))], 10.0
        bounded = [
            one for one in running if one.newest_at is not None and one.request.slo.between_tokens is not None
        ]
        most = longest_moves(running, now, cost, config)
        if not bounded:
            assert most == INFINITE
            continue
        step = StepFeatures()
        for one in running:
            if one.newest_at is not None:
                step[BASE].add_inference(one.computed, 1, 1, None)
        widest = max(cost.margin(config, False, one.request.sampling.max_tokens) for one in bounded)
        due = min((one.newest_at or 0.0) + (one.request.slo.between_tokens or 0.0) for one in bounded)

        low, high = 0.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            fits = now + (middle + cost.predict_features(step)) * (1 + widest) <= due
            low, high = (middle, high) if fits else (low, middle)
        assert widest > 0.1 and most == pytest.approx(low, abs=1e-9)
        decided += most > 0
    assert decided > 10


def sequence(draw: random.Random, key: int) -> Sequence:
    """One that runs, with or without a bound and a first token."""
    slo = SLO(between_tokens=draw.choice([None, draw.uniform(0.01, 1.0)]))
    sampling = SamplingParams(max_tokens=draw.choice([1, 20, 500]))
    made = Sequence(key, Request("r", (1,) * 50, sampling, slo=slo), computed=draw.randint(50, 900))
    made.last_token_at = draw.choice([None, 10.0 - draw.uniform(0.0, 0.01)])
    return made
