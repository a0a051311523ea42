"""Rows of others beside newcomers, against trying each number of them."""

import random

from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.newcomers import INFINITE, SLOWER, decoding, step_limit
from steps import step_costs

STEP, ROW = 0.0023, 0.001  # seconds of a step with any rows, and of each row
COST = step_costs(dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": ROW})


def test_the_longest_held_have_rows_while_the_step_takes_at_most_twice_a_newcomers_own() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, cut, none = random.Random(seed), 0, 0
    for _ in range(200):
        config = SchedulerConfig(4, 4096, bounded_prefill_rows=draw.choice([8, 512]), min_prefill_rows=1)
        share = draw.choice([0.0, 0.05, 0.1])
        running = [made(draw, key, share) for key in range(draw.randint(1, 40))]
        draw.shuffle(running)
        prompts = [one.remaining for one in running if one.request.newcomer and one.newest_at is None]
        most = config.bounded_prefill_rows
        limit = SLOWER * (STEP + ROW * min(sum(prompts), most)) if prompts else INFINITE
        assert abs(step_limit(running, COST, config) - limit) < 1e-12 or not prompts

        ready = [one for one in running if one.remaining == 1]
        newcomers = [one for one in ready if one.request.newcomer]
        others = [one for one in ready if not one.request.newcomer]
        waited = sorted(others, key=lambda one: one.newest_at or one.request.arrival)
        rows = sum(min(one, most) for one in prompts) + sum(one.newest_at is not None for one in newcomers)
        fitting = [n for n in range(len(others) + 1) if not n or STEP + ROW * (rows + n) <= limit + 1e-12]
        chosen = [*newcomers, *(one for one in others if one in waited[: max(fitting)])]
        assert decoding(running, COST, config) == chosen
        cut, none = cut + (max(fitting) < len(others)), none + (not prompts)
    assert cut > 5 and none > 20


def made(draw: random.Random, key: int, share: float) -> Sequence:
    """A running sequence: with one row left, in its prompt, or without rows as its token is under way."""
    request = Request("r", (1,) * 20, newcomer=draw.random() < share, arrival=draw.random())
    one = Sequence(key, request, computed=draw.choice([19, 19, 19, 20, 5]))
    if one.computed == 20 or (one.computed == 19 and draw.random() < 0.9):
        one.first_token_at = one.last_token_at = 1 + draw.random()
    return one
