"""Drafts by prompt lookup against a search token by token, and the settings of speculative decoding."""

import secrets
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from coserve.config import EngineConfig
from coserve.core.speculation import PromptLookup, SpeculativeConfig
from coserve.errors import ConfigError


def proposed(lookup: PromptLookup, tokens: Sequence[int], most: int) -> tuple[int, ...]:
    return lookup.propose(lambda start, count: [*tokens[start : start + count]], len(tokens), most)


def searched(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """The tokens that followed the last of the longest n-grams that are like the end, written out."""
    for n in range(longest, shortest - 1, -1):
        for at in range(len(tokens) - n - 1, -1, -1):
            if [*tokens[at : at + n]] == [*tokens[-n:]]:
                drafts = list[int]()
                while len(drafts) < most:
                    drafts.append([*tokens, *drafts][at + n + len(drafts)])
                return drafts
    return []


def test_drafts_follow_the_last_of_the_longest_n_grams() -> None:
    draws = Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    found = 0
    for _ in range(300):
        longest = draws.randint(1, 5)
        shortest, most = draws.randint(1, longest), draws.randint(1, 9)
        config = SpeculativeConfig(64, prompt_lookup_max=longest, prompt_lookup_min=shortest)
        lookup = PromptLookup(config)
        lookup.learn(64, 64)  # so that it drafts as many as it may
        lookup.learn(64, 64)
        tokens = [draws.choice((0, 1, 0xD800, 151_000)) for _ in range(draws.randint(1, 12))]
        for _ in range(3):  # what is new is read, and no more
            drafts = proposed(lookup, tokens, most)
            wanted = searched(tokens, shortest, longest, most)
            assert [*drafts] == wanted[: len(drafts)] and bool(drafts) == bool(wanted)
            assert len(drafts) == len(wanted) or len(drafts) > 5
            found += len(drafts) > 1
            tokens += [draws.choice((0, 1)) for _ in range(draws.randint(1, 3))]
    assert found > 100


def test_a_lookup_rests_while_drafts_do_not_hold() -> None:
    lookup, tokens = PromptLookup(SpeculativeConfig(8, prompt_lookup_max=1)), [1, 2, 3, 4]
    tried = list[int]()
    for step in range(400):
        tokens.append(tokens[step % 4])
        if (drafts := proposed(lookup, tokens, 8)) and step < 200:
            tried.append(step)
            lookup.learn(len(drafts), 0)
        elif drafts:
            lookup.learn(len(drafts), len(drafts))
    assert 2 < len(tried) < 30, "less and less often, but again and again"
    assert min(later - one for one, later in pairwise(tried)) > 1, "not at once after one that failed"
    tokens.append(tokens[400 % 4])
    assert lookup.rate > 0.9 and len(proposed(lookup, tokens, 8)) == 8
    assert 7.0 < lookup.expected(8) < 8.0 and len(proposed(lookup, tokens, 3)) == 3


def test_what_one_step_searches_is_bounded() -> None:
    lookup = PromptLookup(SpeculativeConfig(4, prompt_lookup_max=2))
    tokens = [7, 8, 9, *([5] * 100_000), 7, 8]
    assert proposed(lookup, tokens, 4) == (), "too far back"
    assert len(lookup._text) <= 16_384
    for _ in range(3):
        tokens += [6] * 20_000
        proposed(lookup, tokens, 4)
        assert len(lookup._text) <= 2 * 16_384


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "has the fields"),
        ("3", "has the fields"),
        ({"num_speculative_tokens": 3, "draft_model": "x"}, "'draft_model' is none of them"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "method must be ngram"),
        ({"num_speculative_tokens": 0}, "between 1 and 64"),
        ({"num_speculative_tokens": True}, "between 1 and 64"),
        ({"num_speculative_tokens": None}, "between 1 and 64"),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 65}, "between 1 and 64"),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "is above"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        EngineConfig(speculative_config=given)
    assert "engine.speculative_config" in str(caught.value) and len(str(caught.value)) < 300


def test_settings_have_vllms_defaults() -> None:
    made = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}').speculation
    assert made is not None and (made.shortest, made.longest) == (5, 5)
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        made = EngineConfig(speculative_config={"num_speculative_tokens": 3, name: 2}).speculation
        assert made is not None and (made.shortest, made.longest) == (2, 2)
    assert EngineConfig().speculation is None
    for other in ({"pipeline_parallel": 2}, {"cluster": "tcp:h:1"}):
        with pytest.raises(ConfigError, match=r"engine\.speculative_config does not go with"):
            EngineConfig(speculative_config={"num_speculative_tokens": 3}, **other)
