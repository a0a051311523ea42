"""The sampler against transformers' processors, against statistics, and against its own promises."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError
from coserve.kernels.native.build import torch_only
from coserve.model import sample as sampler
from coserve.model.noise import gumbel, splitmix64
from coserve.model.sample import NO_TOKEN, SamplingTable, narrowed, sample, sample_plain, token_logprobs

VOCAB = 97
LONG = torch.long


@pytest.fixture
def seed() -> int:
    fresh = random.SystemRandom().randrange(2**31)
    print(f"seed {fresh}")
    torch.manual_seed(fresh)
    return fresh


def table_of(*params: SamplingParams, vocab: int = VOCAB, **kwargs: Any) -> SamplingTable:
    table = SamplingTable(len(params), vocab, **kwargs)
    for slot, wanted in enumerate(params):
        table.set(slot, wanted, seed=wanted.seed or slot, prompt=[1, 2, 3])
    return table


def slots_of(table: SamplingTable) -> torch.Tensor:
    return torch.arange(table.capacity)


def kept(logits: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """Scores [B, V] in token order, -inf for what is dropped."""
    scores, ids = narrowed(logits, slots_of(table), table)
    return torch.full((len(logits), table.vocab), -torch.inf).scatter(1, ids, scores)


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    result: torch.Tensor = steps(torch.zeros(1, 1, dtype=LONG), logits[None])[0]
    return result


CHOICES = itertools.product((0.3, 1.0, 1.7), (0, 1, 7, 500), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 0.6))
COMBINATIONS = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in CHOICES]


@pytest.mark.parametrize("together", [True, False])
def test_temperature_top_k_top_p_and_min_p_are_those_of_transformers(seed: int, together: bool) -> None:
    logits = torch.randn(len(COMBINATIONS), VOCAB) * 3
    want = torch.stack([warped(row, params) for row, params in zip(logits, COMBINATIONS, strict=True)])
    if together:
        got = kept(logits, table_of(*COMBINATIONS))
    else:
        got = torch.cat([kept(row[None], table_of(p)) for row, p in zip(logits, COMBINATIONS, strict=True)])
    torch.testing.assert_close(got, want)


def test_ties_with_the_kth_logit_all_stay(seed: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0])
    for top_p in (1.0, 0.999):
        params = SamplingParams(temperature=1.0, top_k=3, top_p=top_p)
        assert (kept(logits, table_of(params)) > -torch.inf).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 4]


def test_bias_and_repetition_are_those_of_transformers(seed: int) -> None:
    prompts = [torch.randint(VOCAB, (9,)).tolist() for _ in range(4)]
    answers = [torch.randint(VOCAB, (5,)).tolist() for _ in range(4)]
    bias = {3: 2.5, 96: -4.0, 11: 1.0}
    params = SamplingParams(repetition_penalty=1.4, logit_bias=bias, min_tokens=6, stop_token_ids=(8,))
    table = SamplingTable(4, VOCAB, eos_ids=(5,))
    for slot in range(4):
        table.set(slot, params, seed=0, prompt=prompts[slot])
    for column in zip(*answers, strict=True):
        table.recording(torch.arange(4), torch.tensor(column))()
    steps = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
            RepetitionPenaltyLogitsProcessor(1.4),
            MinNewTokensLengthLogitsProcessor(9, 6, [5, 8]),
        ]
    )
    logits = torch.randn(4, VOCAB)
    seen = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    got = table.adjusted(logits, torch.arange(4), torch.full((4,), 14))
    torch.testing.assert_close(got, steps(seen, logits))


def test_presence_and_frequency_count_the_answer_only(seed: int) -> None:
    table = table_of(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), SamplingParams())
    for token in (7, 7, 9):
        table.recording(slots_of(table), torch.tensor([token, token]))()
    logits = torch.randn(2, VOCAB)
    want = logits.clone()
    want[0, 7] -= 0.5 + 2 * 0.25
    want[0, 9] -= 0.5 + 0.25
    torch.testing.assert_close(table.adjusted(logits, slots_of(table), torch.tensor([6, 6])), want)


def test_counts_given_at_once_equal_counts_recorded_and_a_freed_row_starts_empty(seed: int) -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2)
    table = SamplingTable(3, VOCAB)
    table.set(0, params, seed=1, prompt=[50], output=[60, 60])  # its row of counts is used again below
    table.clear(0)
    table.set(1, params, seed=1, prompt=[4, 200], output=[7, 7, 8])
    table.set(2, params, seed=1, prompt=[4, 200])
    for token in (7, 7, 8):
        table.recording(torch.tensor([2]), torch.tensor([token]))()
    logits = torch.randn(1, VOCAB)
    one, two = (table.adjusted(logits, torch.tensor([slot]), torch.tensor([5])) for slot in (1, 2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert (one != logits).nonzero()[:, 1].tolist() == [4, 7, 8]


def test_tokens_ahead_of_a_row_count_as_if_they_were_recorded(seed: int) -> None:
    params = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2, banned=((7, 8), (8, 9, 9))
    )
    table = table_of(params, SamplingParams(), params)
    ahead = [7, 8, 9, 9, VOCAB + 3]  # a prompt may hold tokens that no answer can
    logits = torch.randn(len(ahead) + 3, VOCAB)
    slots = torch.tensor([0] * (len(ahead) + 1) + [1, 2])
    positions = torch.full_like(slots, 20)
    before = [ahead[:n] for n in range(len(ahead) + 1)] + [[7], []]
    found = table.adjusted(logits, slots, positions, before)
    for n in range(len(ahead)):
        own = slice(n, n + 1)
        assert torch.equal(found[own], table.adjusted(logits[own], slots[own], positions[own])), n
        if n < len(ahead) - 1:
            table.recording(slots[own], torch.tensor([ahead[n]]))()
    rest = slice(len(ahead) + 1, None)
    assert torch.equal(found[rest], table.adjusted(logits[rest], slots[rest], positions[rest]))


def test_ends_are_held_back_below_min_tokens_only() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(8,))
    table = SamplingTable(2, VOCAB, eos_ids=(5,))
    table.set(0, params, seed=0, prompt=[1] * 10)
    table.set(1, SamplingParams(min_tokens=3, stop_token_ids=(8,), ignore_eos=True), seed=0, prompt=[1] * 10)
    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 8], logits[:, 70] = 3.0, 2.0, 1.0
    for position, want in ((10, [70, 5]), (12, [70, 5]), (13, [5, 5])):
        assert sample(logits, torch.arange(2), torch.full((2,), position), table).tolist() == want


def test_a_plain_greedy_batch_is_one_argmax_and_leaves_logits_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(*[SamplingParams(temperature=t) for t in (0.0, 1e-7, 0.0)])
    monkeypatch.setattr(sampler, "narrowed", None)
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    assert table.adjusted(logits, slots_of(table), torch.zeros(3, dtype=LONG)) is logits
    got = sample(logits, slots_of(table), torch.zeros(3, dtype=LONG), table)
    assert got.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_greedy_tokens_of_bfloat16_are_those_of_a_copy_in_float32(seed: int) -> None:
    tables = (
        table_of(*[SamplingParams()] * 4),
        table_of(*[SamplingParams()] * 3, SamplingParams(temperature=1.0)),
    )
    positions = torch.arange(4)
    for scale in (1.0, 100.0):  # in the first many are equal
        logits = (torch.randn(4, VOCAB) * scale).round().bfloat16()
        before, want = logits.clone(), logits.float().argmax(-1)
        for table in tables:  # all greedy, and one that draws
            with torch.no_grad():
                got = sample(logits, slots_of(table), positions, table)
            with torch_only(), torch.no_grad():
                assert torch.equal(got, sample(logits, slots_of(table), positions, table))
            assert torch.equal(got[:3], want[:3])
        assert torch.equal(logits, before)


def test_logits_stay_untouched_whatever_is_asked(seed: int) -> None:
    table = table_of(SamplingParams(temperature=1.0, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=2.0,
                                    logit_bias={1: 5.0}, min_tokens=2, stop_token_ids=(2,)))  # fmt: skip
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    sample(logits, torch.tensor([0]), torch.tensor([3]), table)
    assert torch.equal(logits, before)


def test_a_draw_does_not_depend_on_its_company(seed: int) -> None:
    params = [
        SamplingParams(temperature=0.8 + 0.1 * (i % 4), top_k=(0, 9)[i % 2], top_p=(1.0, 0.9, 0.7)[i % 3],
                       min_p=(0.0, 0.02)[i % 2], seed=i)
        for i in range(1, 90)
    ]  # fmt: skip
    table = table_of(*params)
    logits = torch.randn(len(params), VOCAB)
    slots, positions = slots_of(table), torch.randint(5000, (len(params),))
    together = sample(logits, slots, positions, table)
    order = torch.randperm(len(params))
    assert torch.equal(sample(logits[order], slots[order], positions[order], table), together[order])
    for i in range(0, len(params), 7):
        row, alone = slice(i, i + 1), SamplingTable(table.capacity, VOCAB)
        alone.set(i, params[i], seed=params[i].seed or 0, prompt=[])
        assert sample(logits[row], slots[row], positions[row], alone).tolist() == together[row].tolist()


def test_plain_rows_are_sampled_without_the_host_as_with_it(seed: int) -> None:
    params = [SamplingParams(temperature=(0.0, 0.7, 1.5)[i % 3], seed=seed + i) for i in range(80)]
    table = table_of(*params, SamplingParams(temperature=1.0, top_k=3, seed=1))
    logits = 3 * torch.randn(len(params), VOCAB)
    logits[7], logits[8, 0] = -torch.inf, torch.nan
    slots, positions = torch.arange(len(params)), torch.randint(5000, (len(params),))
    assert table.are_plain(range(len(params))) and not table.are_plain(range(len(params) + 1))
    found = sample_plain(logits, slots, positions, table, True)
    assert torch.equal(found, sample(logits, slots, positions, table))
    assert found[7] == found[8] == NO_TOKEN and len({*found.tolist()}) > 5
    greedy = slots[slots % 3 == 0]
    own = logits[greedy], greedy, positions[greedy]
    assert torch.equal(sample_plain(*own, table, False), sample(*own, table))


def test_tiny_differences_of_logits_hardly_change_draws(seed: int) -> None:
    rows = 4000
    logits = torch.randn(rows, 50)
    table = table_of(SamplingParams(temperature=1.0, top_p=0.95, seed=seed), vocab=50)
    slots, positions = torch.zeros(rows, dtype=LONG), torch.arange(rows)
    one = sample(logits, slots, positions, table)
    two = sample(logits + 1e-6 * torch.randn(rows, 50), slots, positions, table)
    assert int((one != two).sum()) <= 3


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected)[probs > 0].sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=12),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_of_one_seed_over_positions_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.linspace(-3, 2, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(5))]
    draws = 40_000
    table = SamplingTable(1, 40)
    table.set(0, params, seed=12345, prompt=[])
    slots = torch.zeros(draws, dtype=LONG)
    tokens = sample(logits.expand(draws, -1), slots, torch.arange(draws), table)
    probs = warped(logits, params).softmax(-1)
    counts = torch.bincount(tokens, minlength=40).float()
    assert counts[probs == 0].sum() == 0
    free = int((probs > 0).sum()) - 1
    assert chi_square(counts, probs) < free + 4.5 * (2 * free) ** 0.5
    wrong = (warped(logits, params) * 1.15).softmax(-1)  # the test can tell a slightly colder distribution
    assert chi_square(counts, wrong) > free + 4.5 * (2 * free) ** 0.5


@pytest.mark.parametrize("vary", ["seeds", "positions", "tokens"])
def test_noise_is_standard_gumbel_in_every_direction(vary: str) -> None:
    count = 50_000
    zero, many = torch.zeros(count, dtype=LONG), torch.arange(count)
    columns = {"seeds": zero, "positions": zero, "tokens": zero, vary: many}
    noise = gumbel(columns["seeds"], columns["positions"], columns["tokens"][:, None])[:, 0].double()
    uniform = torch.exp(-torch.exp(-noise))
    expected = torch.full((100,), 0.01)
    counts = torch.bincount((uniform * 100).long().clamp(max=99), minlength=100).float()
    assert chi_square(counts, expected) < 99 + 4.5 * (2 * 99) ** 0.5
    neighbours = torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1]
    assert abs(float(neighbours)) < 4.5 / count**0.5
    assert torch.isfinite(noise).all()


def test_splitmix64_equals_its_definition_in_python_integers(seed: int) -> None:
    def reference(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    inputs = [0, 1, -1, 2**63 - 1, -(2**63), *torch.randint(-(2**62), 2**62, (200,)).tolist()]
    hashed = splitmix64(torch.tensor(inputs)).tolist()
    assert [h % 2**64 for h in hashed] == [reference(x % 2**64) for x in inputs]


def test_seeds_of_any_size_are_taken_modulo_two_to_the_64(seed: int) -> None:
    table = SamplingTable(3, VOCAB)
    for slot, wanted in enumerate((seed, seed + 2**64, seed - 2**65)):
        table.set(slot, SamplingParams(temperature=1.0), seed=wanted, prompt=[])
    tokens = sample(torch.zeros(3, VOCAB), torch.arange(3), torch.full((3,), 4), table)
    assert len(set(tokens.tolist())) == 1


def test_penalty_less_top_p_sorts_at_most_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original: Callable[..., Any] = torch.Tensor.sort

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.shape[-1])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    slot, position = torch.zeros(1, dtype=LONG), torch.zeros(1, dtype=LONG)
    for params, want in (
        (SamplingParams(temperature=1.0, top_p=0.9), [VOCAB]),
        (SamplingParams(temperature=1.0, top_p=0.9, top_k=6), [6, 6]),  # token ids, then scores
        (SamplingParams(temperature=1.0, min_p=0.1), []),
    ):
        calls.clear()
        with torch_only():
            sample(torch.randn(1, VOCAB), slot, position, table_of(params))
        assert calls == want


def test_logprobs_are_those_of_log_softmax(seed: int) -> None:
    logits = torch.randn(6, VOCAB)
    tokens = torch.randint(VOCAB, (6,))
    found = token_logprobs(logits, tokens, 4)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(found.chosen, want.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(found.top, want.topk(4).values)
    first = found.rows()[0]
    assert first.top[0][0] == int(logits[0].argmax()) and len(first.top) == 4
    assert token_logprobs(logits, tokens, 0).rows()[0].top == ()


def test_clearing_a_slot_makes_the_table_plain_again() -> None:
    table = table_of(SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0,
                                    logit_bias={1: 5.0}, min_tokens=2, stop_token_ids=(2,),
                                    logprobs=3))  # fmt: skip
    assert not table.is_plain and table.logprobs == {0: 3}
    table.clear(0)
    assert table.is_plain and not table.logprobs
    assert not (table.drawing or table.limited or table.nucleus or table.floored)
    assert sample(torch.eye(VOCAB)[4:5], torch.tensor([0]), torch.tensor([0]), table).tolist() == [4]


@pytest.mark.parametrize(
    "params", [SamplingParams(logit_bias={VOCAB: 1.0}), SamplingParams(stop_token_ids=(-1,))]
)
def test_tokens_the_model_does_not_have_are_refused(params: SamplingParams) -> None:
    with pytest.raises(ConfigError, match=r"names token (97|-1); the model has 97"):
        table_of(params)
    with pytest.raises(AssertionError, match="slot 1 is not one of 1"):
        SamplingTable(1, VOCAB).set(1, SamplingParams(), seed=0, prompt=[])


def test_the_border_of_top_p_is_dropped_and_the_likeliest_token_never() -> None:
    """As in transformers: a tail of exactly 1 - top_p goes, one that rounds to 1 leaves a token."""
    logits = torch.zeros(1, 4)
    quarter = table_of(SamplingParams(temperature=1.0, top_p=0.75), vocab=4)
    assert int((kept(logits, quarter) > -torch.inf).sum()) == 3
    logits[0, 2] = 1.0
    least = table_of(SamplingParams(temperature=1.0, top_p=1e-9), vocab=4)
    assert (kept(logits, least) > -torch.inf).nonzero()[:, 1].tolist() == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_without_a_finite_logit_has_no_token_and_others_have_theirs(
    temperature: float, dtype: torch.dtype, top_k: int
) -> None:
    table = SamplingTable(4, 64)
    for slot in range(4):
        params = SamplingParams(temperature=temperature, top_k=top_k, logit_bias={0: -1.0} if top_k else {})
        table.set(slot, params, slot, [1])
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    slots, positions = torch.arange(4), torch.full((4,), 9)
    whole = sample(logits, slots, positions, table)
    broken = logits.clone()
    broken[1], broken[2, 7] = -torch.inf, torch.nan
    found = sample(broken, slots, positions, table).tolist()
    assert found == [whole[0], NO_TOKEN, NO_TOKEN, whole[3]]
