"""Losses and draws over a vocabulary of which ranks have parts are those of one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import SamplingParams
from coserve.model.logits import Logits
from coserve.model.sample import NO_TOKEN, sample
from coserve.model.sampling_table import SamplingTable
from coserve.model.sharded.vocabulary import LogitShards
from threaded_ranks import ThreadRanks, on_ranks

ROWS, VOCABULARY = 7, 24
GENERATOR = torch.Generator().manual_seed(11)
LOGITS = 5.0 * torch.randn(ROWS, VOCABULARY, generator=GENERATOR, dtype=torch.float64)
LOGITS[0] += 800.0  # whose exponentials overflow
LOGITS[1, 3] = LOGITS[1, 21] = 40.0  # two likeliest ones, on the first rank and on the last one
LABELS = torch.randint(VOCABULARY, (ROWS,), generator=GENERATOR)
CANDIDATES = torch.stack([torch.randperm(VOCABULARY, generator=GENERATOR)[:5] for _ in range(ROWS)])
OF_LABELS = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
OF_CANDIDATES = torch.randn(ROWS, 5, generator=GENERATOR, dtype=torch.float64)
Compute = Callable[[Logits, Tensor], Any]
# What is computed, and whether it has a number for each token of the vocabulary.
CASES: dict[str, tuple[Compute, tuple[bool, ...]]] = {
    "cross entropy": (lambda of, x: of.cross_entropy(x, LABELS, 0.25), (False, True)),
    "targets": (lambda of, x: (of.target_logprobs(x, LABELS),), (False,)),
    "gradients of targets": (lambda of, x: (of.logprob_vjp(x, LABELS, OF_LABELS),), (True,)),
    "candidates": (lambda of, x: (of.candidate_logprobs(x, CANDIDATES, 1.7),), (False,)),
    "gradients of candidates": (
        lambda of, x: (of.candidate_vjp(x, CANDIDATES, OF_CANDIDATES, 1.7),),
        (True,),
    ),
    "likeliest": (lambda of, x: (of.likeliest(x),), (False,)),
    "top": (lambda of, x: of.top_logprobs(x[2:], 9), (False, False)),  # more than one of four ranks has
}


def of_rank(ranks: ThreadRanks) -> LogitShards:
    return LogitShards(None, ranks, VOCABULARY // ranks.count)  # type: ignore[arg-type]  # no head is run


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_whole_logits(case: str, count: int) -> None:
    compute, by_token = CASES[case]
    want = compute(Logits(), LOGITS)

    def found(ranks: ThreadRanks) -> list[Tensor]:
        own = compute(of_rank(ranks), ranks.columns_of(LOGITS).contiguous())
        return [ranks.columns(x) if cut else x for x, cut in zip(own, by_token, strict=True)]

    for own in on_ranks(count, found):
        for one, other in zip(own, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_draws_are_those_from_whole_logits() -> None:
    """Greedy rows beside some that draw; one has no finite logit."""
    params = [SamplingParams(temperature=float(row % 3) / 2) for row in range(ROWS)]
    table = SamplingTable(ROWS, VOCABULARY, (), torch.device("cpu"))
    for row, own in enumerate(params):
        table.set(row, own, seed=40 + row, prompt=[1, 2])
    logits = LOGITS.clone()
    logits[6] = -torch.inf
    slots, positions = torch.arange(ROWS), torch.arange(ROWS) + 3
    want = sample(logits, slots, positions, table)
    assert table.are_plain(range(ROWS)) and want[6] == NO_TOKEN and len(set(want.tolist())) > 3

    def found(ranks: ThreadRanks) -> Tensor:
        return of_rank(ranks).draw(ranks.columns_of(logits), slots, positions, table)

    assert all(torch.equal(own, want) for own in on_ranks(4, found))
