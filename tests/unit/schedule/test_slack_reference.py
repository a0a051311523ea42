"""Slack against the bounds of every request, spelled out one by one, for steps of known seconds."""

import random
from collections.abc import Iterator

import pytest

from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.places import Places
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.slack import INFINITE, measure, own_slowdown
from steps import step_costs

NOW, STEP, ROW = 10.0, 0.01, 0.001  # seconds of a step with any rows, and of each row
COST = step_costs(dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": ROW})
SURE = 0.9  # of a later step's slack that is counted on


def drawn(draw: random.Random, key: int, runs: bool, loose: bool) -> Sequence:
    """A request with any bounds, or a loose one; one that runs has a row in the step."""
    bounds = {name: draw.choice([None, None, draw.uniform(0.02, 3.0)]) for name in (
        "first_token", "between_tokens", "end_to_end", "deferral"
    )}  # fmt: skip
    slo = (
        SLO(between_tokens=60.0)
        if loose
        else SLO(**bounds, slowdown=draw.choice([None, None, draw.uniform(1.1, 3.0)]))
    )
    sampling = SamplingParams(max_tokens=draw.choice([5, 30, 300]))
    rows, arrival = draw.randint(2, 40), NOW - draw.uniform(0.0, 1.0)
    made = Sequence(key, Request(str(key), (1,) * rows, sampling, slo=slo, arrival=arrival))
    made.deferred = draw.uniform(0.0, 0.5)
    if runs:
        made.output, made.computed = [1] * draw.randint(1, 4), rows
        made.computed += len(made.output) - 1
        made.first_token_at = draw.uniform(arrival, NOW)
        made.last_token_at = draw.uniform(made.first_token_at, NOW)
        made.deferred_first = made.deferred * draw.random()
    return made


def test_a_step_has_the_time_that_every_bound_of_every_request_leaves() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, some = random.Random(seed), dict.fromkeys(("training", "whole", "coming", "deferral"), 0)
    for _ in range(400):
        config = SchedulerConfig(
            4, 4096, max_running=draw.choice([1, 3, 8]), slowdown=1.5, bounded_prefill_rows=32,
            min_prefill_rows=1, reliability=0.9,
        )  # fmt: skip
        COST.misses = type(COST.misses)()
        for _ in range(100):
            COST.misses.observe(draw.uniform(0.95, 1.3), trains=True)
        queues, builder = RequestQueues(BaseCache(config, PagePool(4096, 64))), PlanBuilder(NOW)
        queues.running = [
            drawn(draw, key, True, draw.random() < 0.4)
            for key in range(draw.randint(0, min(config.max_running, 3)))
        ]
        for one in queues.running:
            builder.add(one, 1)
        for key in range(10, 10 + draw.randint(0, 4)):
            queues.join(drawn(draw, key, False, False))
        utilization = draw.random()
        found = measure(builder, queues, COST, config, utilization, Places())

        limits = {"training": [INFINITE], "whole": [INFINITE], "coming": [INFINITE], "deferral": [INFINITE]}
        for name, seconds in bounds_of(queues, config, utilization):
            limits[name].append(seconds)
        for name, seconds in limits.items():
            assert getattr(found, name) == pytest.approx(max(min(seconds), 0.0)), name
            some[name] += 0 < min(seconds) < INFINITE
    assert min(some.values()) > 20


def bounds_of(
    queues: RequestQueues, config: SchedulerConfig, utilization: float
) -> Iterator[tuple[str, float]]:
    """The seconds that each bound of each request leaves, by the field of `Slack` that they limit."""
    running, rows = queues.running, 0
    step = STEP + ROW * len(running) if running else 0.0
    ends = sorted(one.steps_left for one in running)
    margin = COST.margin(config, trains=True)
    line = [*running, *queues.waiting[: config.max_running]]
    for place, one in enumerate(line):
        slo, arrival, tokens = one.request.slo, one.request.arrival, one.request.sampling.max_tokens
        each = COST.margin(config, trains=True, tokens=tokens)
        rest = 0 if one in running else one.remaining
        rows += rest
        steps = -(-rows // config.bounded_prefill_rows) if rest else 0
        prompts = steps * (STEP + ROW * len(running)) + ROW * rows if rest else 0.0
        # It waits until enough answers have ended that it has a place.
        waits = 0
        if one not in running and running and place >= config.max_running:
            waits = ends[min(place - config.max_running, len(ends) - 1)]
        ahead = step * (1 + waits) + prompts
        is_bound = False
        if slo.first_token is not None and one.newest_at is None:
            first = (arrival + slo.first_token - NOW) / (1 + margin) - ahead
            yield "training", first / (waits + 1)
            yield "whole", first
            is_bound = True
        if slo.between_tokens is not None:
            if one.newest_at is not None:
                left = (one.newest_at + slo.between_tokens - NOW) / (1 + each) - ahead
                yield "training", left
                yield "whole", left
                is_bound = True
            decode = STEP + ROW * len(running) if running else 0.0
            yield "coming", SURE * (slo.between_tokens / (1 + each) - decode)
        if slo.end_to_end is not None and arrival + slo.end_to_end > NOW:
            left = (arrival + slo.end_to_end - NOW) / (1 + margin / one.steps_left**0.5)
            left -= ahead + (one.steps_left - 1) * step
            yield "training", left / one.steps_left
            yield "whole", left
            is_bound = True
        if slo.deferral is not None:
            left = slo.deferral - one.deferred
            yield "training", left / (1 + each)
            yield "whole", left / (1 + each)
            yield "coming", left / (1 + margin)
            yield "deferral", left / (1 + margin)
            is_bound = True
        slowdown = slo.slowdown or (None if is_bound else config.slowdown)
        if slowdown is not None:
            since, taken = arrival, one.deferred
            if one.first_token_at is not None:
                since, taken = one.first_token_at, one.deferred - one.deferred_first
            # What the tokens would have taken without training, times the slowdown, is not to be passed.
            whole = NOW - since + ahead
            direct = own_slowdown(slowdown, utilization)
            yield "training", direct * (whole - taken) - whole
            yield "whole", direct * (whole - taken) - whole
