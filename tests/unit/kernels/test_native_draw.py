"""Tokens drawn by the kernel in C, beside the plain path that specifies it."""

import random

import pytest
import torch
from torch import Tensor

from coserve.core.request import SamplingParams
from coserve.kernels.native.build import library, torch_only
from coserve.kernels.native.draw import UNDECIDED, draw, takes
from coserve.model.noise import gumbel
from coserve.model.sample import SamplingTable, sample

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DRAWS = random.Random()
ROWS = 60


@pytest.fixture(autouse=True)
def _fresh() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    DRAWS.seed(seed)
    torch.manual_seed(seed)


def table_of(params: list[SamplingParams], vocabulary: int) -> SamplingTable:
    table = SamplingTable(len(params), vocabulary)
    for slot, own in enumerate(params):
        table.set(slot, own, seed=DRAWS.getrandbits(64), prompt=[])
    return table


def drawn_params(rows: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=DRAWS.choice([0.0, 0.3, 0.7, 1.0, 1.7]),
            top_k=DRAWS.choice([0, 0, 1, 7, 50, 900]),
            top_p=DRAWS.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
            min_p=DRAWS.choice([0.0, 0.0, 0.05, 0.6]),
        )
        for _ in range(rows)
    ]


def both(logits: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the kernel alone, of `sample`, and of `sample` without kernels; rows in random slots."""
    slots, positions = torch.randperm(len(logits)), torch.randint(100_000, (len(logits),))
    assert takes(logits)
    with torch_only():
        plain = sample(logits, slots, positions, table)
    return draw(logits, slots, positions, table.columns), sample(logits, slots, positions, table), plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 200, 1001, 5000])
def test_tokens_are_the_plain_paths(vocabulary: int, dtype: torch.dtype) -> None:
    decided = 0
    for scale in (0.1, 3.0, 10.0):
        table = table_of(drawn_params(ROWS), vocabulary)
        wide = (torch.randn(ROWS, vocabulary + 3) * scale).to(dtype)
        logits = wide[:, :vocabulary]
        before = logits.clone()
        kernel, whole, plain = both(logits, table)
        assert torch.equal(whole, plain) and torch.equal(logits, before)
        found = kernel != UNDECIDED
        assert torch.equal(kernel[found], plain[found])
        decided += int(found.sum())
    assert decided >= 0.95 * 3 * ROWS


def test_many_plain_draws_are_the_plain_paths() -> None:
    """All that bias, penalties and grammars leave: some tokens are out of question."""
    for _ in range(4):
        table = table_of([SamplingParams(temperature=DRAWS.choice([0.5, 1.0, 2.0]))] * 500, 300)
        logits = torch.randn(500, 300) * 2
        logits[torch.rand(500, 300) < 0.3] = -torch.inf
        kernel, whole, plain = both(logits, table)
        assert torch.equal(whole, plain) and (kernel == UNDECIDED).sum() <= 5
        assert bool(torch.isfinite(logits.gather(1, whole[:, None])).all())


def test_sums_that_only_rounding_tells_apart_are_left() -> None:
    """Of 40 million noises the smallest, which one unit in the last place of a uniform moves by 0.001."""
    table = table_of([SamplingParams(temperature=1.0)] * ROWS, 200)
    for _ in range(10):
        slots, positions = torch.randint(ROWS, (20_000,)), torch.randint(100_000, (20_000,))
        noise = gumbel(table.seed[slots], positions, torch.arange(200).expand(20_000, -1))
        rows = noise.amin(1).argsort()[:200]
        slots, positions, logits = slots[rows], positions[rows], 20.0 - noise[rows]
        assert bool((draw(logits, slots, positions, table.columns) == UNDECIDED).all())
        with torch_only():
            plain = sample(logits, slots, positions, table)
        assert torch.equal(sample(logits, slots, positions, table), plain)
        raised = torch.randint(200, (len(rows),))
        logits[torch.arange(len(rows)), raised] += 1e-3
        assert torch.equal(draw(logits, slots, positions, table.columns), raised)


def test_a_share_at_the_border_of_top_p_is_left() -> None:
    """Three of seven equal tokens are as likely as what top-p drops, but for rounding."""
    table = table_of([SamplingParams(temperature=1.0, top_p=4 / 7)] * 2 * ROWS, 7)
    kernel, whole, plain = both(torch.zeros(2 * ROWS, 7), table)
    assert torch.equal(whole, plain)
    assert {UNDECIDED} < set(kernel.tolist()) <= {UNDECIDED, 3, 4, 5, 6}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_that_are_not_finite_give_what_they_give_without_the_kernel(
    value: float, dtype: torch.dtype
) -> None:
    table = table_of(drawn_params(ROWS), 100)
    one = torch.randn(ROWS, 100)
    one[torch.arange(ROWS), torch.randint(100, (ROWS,))] = value
    for logits in (one, torch.full((ROWS, 100), value)):
        _, whole, plain = both(logits.to(dtype), table)
        assert torch.equal(whole, plain)


def test_a_row_does_not_depend_on_its_company_or_on_threads() -> None:
    table = table_of(drawn_params(ROWS), 2000)
    logits, slots = torch.randn(ROWS, 2000).bfloat16(), torch.arange(ROWS)
    kept, together = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            together.append(draw(logits, slots, slots, table.columns))
    finally:
        torch.set_num_threads(kept)
    assert torch.equal(*together)
    for row in DRAWS.sample(range(ROWS), 8):
        own = slice(row, row + 1)
        assert torch.equal(draw(logits[own], slots[own], slots[own], table.columns), together[0][own])
