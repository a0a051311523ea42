"""Answers do not depend on where adapters lie: with memory for some 2 of 6, and with all in memory."""

import random
from pathlib import Path

import pytest

from coserve import SamplingParams
from coserve.engine.completion import Completion
from paged import METHODS, make_engine, stored

NAMES = ("lora", "larger-lora", "dora", "ia3", "prefix", "ia3-and-lora")
ROOM = 1.25  # of what the largest one needs


@pytest.mark.parametrize("sharing", [True, False], ids=["shared prefixes", "nothing shared"])
def test_answers_of_paged_adapters_are_those_of_adapters_in_memory(tmp_path: Path, sharing: bool) -> None:
    plain = make_engine(prefix_sharing=sharing)
    for seed, name in enumerate(NAMES):
        plain.adapters.load(name, stored(plain, tmp_path / name, METHODS[name], seed))
    costs = [plain.adapters.look_at(name, tmp_path / name).cost for name in NAMES]
    limit = int(ROOM * max(costs))
    assert limit < 0.7 * sum(costs)
    paged = make_engine(prefix_sharing=sharing, adapter_memory=limit, max_running=4)
    for name in NAMES:
        paged.adapters.register(name, tmp_path / name)
    draws = random.Random(1)
    asked = []
    for turn in range(36):
        prompt = [draws.randrange(1, 96) for _ in range(draws.choice((3, 17, 30)))]
        name = draws.choice((*NAMES, None))
        sampling = SamplingParams(max_tokens=draws.randint(2, 9), ignore_eos=True, temperature=1.0, seed=turn)
        asked.append((prompt, name, sampling))
    expected = [plain.generate(*one).result().tokens for one in asked]
    handles: list[Completion] = []
    for number, one in enumerate(asked):
        handles.append(paged.generate(*one))
        for _ in range(number % 5):
            paged.step()
            assert paged.adapters.cache.nbytes().paged <= limit
        if number % 12 == 11:  # those that are asked next find others in memory
            for handle in handles:
                handle.result()
    assert [handle.result().tokens for handle in handles] == expected
    assert paged.stats().paging.dropped > len(NAMES), "adapters came and went"
