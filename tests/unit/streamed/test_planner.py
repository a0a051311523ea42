"""The choice of blocks that stay in memory, against trying every one."""

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from coserve.errors import ConfigError
from coserve.streamed.planner import ResidencePlan, least_bytes, plan_residence


def by_trying(blocks: Sequence[int], budget: int, buffers: int) -> int | None:
    """Fewest bytes read in a pass within the budget; None where nothing fits."""
    found = []
    for count in range(len(blocks) + 1):
        for stay in combinations(range(len(blocks)), count):
            go = [nbytes for place, nbytes in enumerate(blocks) if place not in stay]
            need = sum(blocks[place] for place in stay) + (buffers * max(go) if go else 0)
            if need <= budget:
                found.append(sum(go))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_reads_least(seed: int) -> None:
    draws = random.Random(seed)
    kinds = [draws.randint(1, 40) for _ in range(draws.randint(1, 4))]
    blocks = [draws.choice(kinds) for _ in range(draws.randint(1, 9))]
    buffers = draws.randint(2, 3)
    for budget in range(1, sum(blocks) + 2, 3):
        wanted = by_trying(blocks, budget, buffers)
        if wanted is None:
            with pytest.raises(ConfigError, match="at least"):
                plan_residence(blocks, budget, buffers)
            assert budget < least_bytes(blocks, buffers)
            continue
        plan = plan_residence(blocks, budget, buffers)
        go = [nbytes for place, nbytes in enumerate(blocks) if place not in plan.resident]
        assert sum(go) == plan.read_nbytes == wanted and budget >= least_bytes(blocks, buffers)
        stay = sum(blocks[place] for place in plan.resident)
        assert stay + plan.buffers * plan.buffer_nbytes <= budget
        assert plan.buffer_nbytes >= max(go, default=0)


def test_the_least_budget_is_the_smallest_that_works() -> None:
    for blocks in ([10] * 5, [10, 10, 200, 10], [3], [7, 9]):
        least = least_bytes(blocks)
        plan_residence(blocks, least)
        with pytest.raises(ConfigError, match=f"at least {least} bytes are needed"):
            plan_residence(blocks, least - 1)
    assert least_bytes([10] * 5) == 20 and least_bytes([10, 10, 200, 10]) == 220


def test_a_base_that_fits_needs_no_buffers() -> None:
    assert plan_residence([5, 6, 7], 18) == ResidencePlan(frozenset({0, 1, 2}), 0, 0, 0)


def test_streamed_blocks_are_spread_over_the_chain() -> None:
    """Between any two are as many others, so that reading goes on while these compute."""
    for stay in range(1, 30):
        plan = plan_residence([8] * 32, 8 * (stay + 2))
        go = sorted({*range(32)} - plan.resident)
        gaps = [b - a for a, b in zip(go, [*go[1:], go[0] + 32], strict=True)]
        assert len(go) == 32 - stay and max(gaps) - min(gaps) <= 1


def test_many_kinds_of_blocks_take_no_time() -> None:
    draws = random.Random(1)
    blocks = [draws.randint(1 << 20, 1 << 26) for _ in range(60)]
    plan = plan_residence(blocks, sum(blocks) // 2)
    left = sum(blocks) // 2 - 2 * plan.buffer_nbytes - (sum(blocks) - plan.read_nbytes)
    assert 0 <= left < max(blocks) / 100
