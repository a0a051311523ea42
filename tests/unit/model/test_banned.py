"""Sequences of tokens that an answer must not have."""

import random
import secrets

import pytest
import torch

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError
from coserve.model.banned import BannedSequences
from coserve.model.sample import sample
from coserve.model.sampling_table import SamplingTable, check_sampling

VOCAB = 4  # few, so that sequences are often begun


def holds(answer: list[int], banned: tuple[int, ...]) -> bool:
    return any(tuple(answer[at:][: len(banned)]) == banned for at in range(len(answer)))


def test_no_answer_has_them_and_nothing_else_is_left_out() -> None:
    """Against a look at the whole answer, wherever it was preempted."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(20):
        banned = tuple(
            tuple(draw.choices(range(VOCAB), k=draw.randint(2, 4))) for _ in range(draw.randint(1, 4))
        )
        params = SamplingParams(banned=banned, temperature=draw.choice([0.0, 1.0]), seed=1)
        table, plain = SamplingTable(3, VOCAB), SamplingTable(3, VOCAB)
        plain.set(1, SamplingParams(temperature=params.temperature, seed=1), 1, [0])
        table.set(1, params, 1, [0])
        slots, answer = torch.tensor([1]), list[int]()
        for _ in range(40):
            wanted = {last for *before, last in banned if answer[-len(before) :] == before}
            assert {*BannedSequences(banned, answer).next()} == wanted
            logits, place = torch.randn(1, VOCAB), torch.tensor([len(answer) + 1])
            token = sample(logits, slots, place, table)
            if len(wanted) == VOCAB:
                assert token.item() < 0  # none is left
                break
            logits[0, [*wanted]] = -torch.inf
            assert token.item() == sample(logits, slots, place, plain).item()
            if draw.random() < 0.5:  # it was preempted
                table.clear(1)
                assert table.is_plain
                table.set(1, params, 1, [0], answer)
            table.recording(slots, token)()
            answer.append(int(token.item()))
        assert not any(holds(answer, one) for one in banned)


@pytest.mark.parametrize("banned", [((1,),), ((1, VOCAB),), ((1, -1),), ((1, "2"),)])
def test_what_cannot_be_banned(banned: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.banned"):
        check_sampling(SamplingParams(banned=banned), VOCAB, None)
