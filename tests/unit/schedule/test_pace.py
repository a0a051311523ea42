"""The length of steps while prompts wait, against trying very many lengths."""

import random

import pytest

from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.overlap import Overlap
from coserve.schedule.pace import INFINITE, prefill_limit
from coserve.schedule.plan_builder import PlanBuilder
from steps import step_costs

NOW, STEP, ROW = 10.0, 0.01, 0.001  # seconds of a step with any rows, and of each row
COST = step_costs(dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": ROW})


def prompt(draw: random.Random, key: int) -> Sequence:
    """One in the line; few have their first token, as they were preempted."""
    slo = SLO(first_token=draw.choice([None, draw.uniform(0.05, 3.0)]))
    rows = draw.randint(1, 400)
    made = Sequence(key, Request("r", (1,) * rows, slo=slo, arrival=NOW - draw.uniform(0.0, 1.0)))
    made.computed = draw.choice([0, rows // 2])
    if draw.random() < 0.1:
        made.first_token_at = made.last_token_at = NOW - 0.1
    return made


def answer(draw: random.Random, key: int) -> Sequence:
    slo = SLO(between_tokens=draw.choice([None, draw.uniform(0.02, 0.5)]))
    sampling = SamplingParams(max_tokens=draw.choice([1, 20, 500]))
    made = Sequence(key, Request("r", (1,) * 50, sampling, slo=slo), computed=49)
    made.first_token_at = made.last_token_at = draw.choice([None, NOW - draw.uniform(0.0, 0.02)])
    return made


def test_steps_are_as_long_as_both_bounds_are_missed_alike() -> None:
    """Steps keep the bound between tokens while every first token then comes in time. Otherwise they grow
    until its largest violation is that of a first token, or as many rows pass as may."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, kinds = random.Random(seed), list[str]()
    for _ in range(80):
        config = SchedulerConfig(
            4,
            4096,
            max_running=draw.choice([3, 64]),
            bounded_prefill_rows=draw.choice([64, 512]),
            min_prefill_rows=draw.choice([1, 16]),
            patience=draw.choice([0.0, 0.3]),
            overlap=draw.choice([Overlap(), Overlap(), Overlap(3, 2.5)]),
        )
        COST.misses = type(COST.misses)()
        for _ in range(100):
            COST.misses.observe(draw.uniform(0.9, 1.4), trains=draw.random() < 0.5)
        builder, line = PlanBuilder(NOW), [prompt(draw, key) for key in range(draw.randint(0, 6))]
        for key in range(100, 100 + draw.randint(1, 4)):
            builder.add(answer(draw, key), 1)
        trains, answering = draw.random() < 0.3, builder.answering
        margin = COST.margin(config, trains, max(one.request.sampling.max_tokens for one in answering))
        found = prefill_limit(builder, line, COST, config, trains)

        bounds = [
            (one.newest_at, one.request.slo.between_tokens)
            for one in answering
            if one.newest_at is not None and one.request.slo.between_tokens is not None
        ]
        if not bounds:
            kinds.append("no bound")
            assert found == INFINITE
            continue
        kept = min((newest + bound - NOW) / (1 + margin) for newest, bound in bounds)
        decode, least = STEP + ROW * len(answering), ROW * config.min_prefill_rows
        longest = decode + ROW * min(512, config.bounded_prefill_rows)

        def late(step: float) -> float:
            """The largest violation of a bound on a first token by steps of this length."""
            rows, worst = 0, 0.0
            for one in line[: config.max_running]:  # noqa: B023
                rows += one.remaining
                bound = one.request.slo.first_token
                bound = config.patience if bound is None else bound  # noqa: B023
                steps = rows / (max(step - decode, least) / ROW)  # noqa: B023
                taken = steps * max(step, decode + least) * (1 + margin) / config.overlap.rate  # noqa: B023
                if one.newest_at is None and bound:
                    worst = max(worst, (NOW - one.request.arrival + taken) / bound)
            return worst

        if not line or late(kept) <= 1:
            kinds.append("both kept")
            assert found == kept
            continue
        tried = [kept + (max(kept, longest) - kept) * part / 2048 for part in range(2049)]
        alike = [
            step
            for step in tried
            if step * (1 + margin) <= min(newest + late(step) * bound - NOW for newest, bound in bounds)
        ]
        kinds.append("grown" if max(alike) < longest else "as long as may be")
        assert found == pytest.approx(max(alike), abs=2 * (tried[1] - tried[0]))
    assert {"no bound", "both kept", "grown"} <= {*kinds}, kinds
