from collections.abc import Collection

import pytest

from coserve.core.request import BASE, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.prompt_packer import PromptPacker
from coserve.schedule.request_queues import RequestQueues
from steps import step_costs

CONFIG = SchedulerConfig(layers=1, max_positions=256, min_prefill_rows=4)
COST = step_costs(dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_rows": 0.01})
NEVER = float("inf")
LEAST = 4  # rows of the first prompt in a step


def packed(
    prompts: list[int], left: int = 256, limit: float = NEVER, closed: Collection[str] = (), pages: int = 64
) -> list[int]:
    """Rows that each prompt has in the step, in the order of the line."""
    queues, builder = RequestQueues(BaseCache(CONFIG, PagePool(pages, 4))), PlanBuilder(0.0)
    line = [
        Sequence(key, Request("r", (key,) * prompt, SamplingParams(max_tokens=1)))
        for key, prompt in enumerate(prompts, start=1)
    ]
    for sequence in line:
        queues.join(sequence)
    PromptPacker(builder, queues, COST, CONFIG, left, limit, set(closed), LEAST).pack(line)
    rows = {segment.key: segment.length for segment in builder.inference}
    return [rows.get(sequence.key, 0) for sequence in line]


def test_rows_last_until_the_step_is_full() -> None:
    assert packed([20, 20, 20], left=30) == [20, 10, 0]


@pytest.mark.parametrize(("limit", "rows"), [(0.305, [20, 10, 0]), (0.205, [20, 0, 0]), (0.015, [4, 0, 0])])
def test_seconds_bound_the_rows_but_for_the_least_of_the_first_prompt(limit: float, rows: list[int]) -> None:
    assert packed([20, 20, 20], limit=limit) == rows


def test_nobody_enters_where_pages_would_change_hands() -> None:
    assert packed([20, 20], closed=[BASE]) == [0, 0]


def test_who_finds_no_pages_lets_nobody_overtake() -> None:
    """Of six pages the first prompt takes three; the second would take five, the third two."""
    assert packed([11, 19, 7], pages=6) == [11, 0, 0]
