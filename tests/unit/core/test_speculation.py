"""Drafts by prompt lookup against a search token by token, and the settings of speculative decoding."""

import secrets
from array import array
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from coserve.config import EngineConfig
from coserve.core import speculation
from coserve.core.speculation import PromptLookup, SpeculativeConfig
from coserve.errors import ConfigError


def proposed(lookup: PromptLookup, tokens: Sequence[int], most: int) -> tuple[int, ...]:
    def given(start: int, count: int) -> list[int]:
        return [*tokens[start : start + count]]

    while lookup.missing(len(tokens)) > speculation.NEW_TOKENS:
        assert lookup.propose(given, len(tokens), most) == (), "what follows is not known yet"
        lookup.read(given, len(tokens), 4096)
    return lookup.propose(given, len(tokens), most)


def searched(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """The tokens that followed the longest n-gram that is like the end, of the last eight, written out."""
    places = [at for at in range(len(tokens) - 1, shortest - 1, -1)
              if [*tokens[at - shortest : at]] == [*tokens[-shortest:]]][:8]  # fmt: skip
    found, best = None, 0
    for at in places:
        same = max(n for n in range(min(at, longest) + 1) if [*tokens[at - n : at]] == [*tokens[-n or at :]])
        if same > best:
            found, best = at, same
    drafts = list[int]()
    while found is not None and len(drafts) < most:
        drafts.append([*tokens, *drafts][found + len(drafts)])
    return drafts


def patient(config: SpeculativeConfig, longest: int = 16_384) -> PromptLookup:
    """A lookup that drafts as many as it may."""
    lookup = PromptLookup(config, longest)
    lookup.learn(64, 64)
    lookup.learn(64, 64)
    return lookup


def test_drafts_follow_the_last_of_the_longest_n_grams() -> None:
    draws = Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    found = 0
    for _ in range(300):
        longest = draws.randint(1, 5)
        shortest, most = draws.randint(1, longest), draws.randint(1, 9)
        config = SpeculativeConfig(64, prompt_lookup_max=longest, prompt_lookup_min=shortest)
        lookup = patient(config, draws.choice((1, 8, 16_384)))
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


def test_long_texts_are_read_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small window: what is found is what is in the text, which has the newest tokens."""
    monkeypatch.setattr(speculation, "_WINDOW", 64)
    monkeypatch.setattr(speculation, "NEW_TOKENS", 4)
    draws = Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    found = anew = 0
    for _ in range(20):
        config = SpeculativeConfig(5, prompt_lookup_max=4, prompt_lookup_min=draws.randint(1, 4))
        lookup, tokens = patient(config, 64), [draws.randrange(4) for _ in range(draws.randint(1, 200))]

        def given(start: int, count: int, tokens: list[int] = tokens) -> list[int]:
            return tokens[start : start + count]

        for _ in range(60):
            held = len(lookup._text)
            lookup.read(given, len(tokens), draws.randint(0, 30))
            anew += len(lookup._text) < held
            if lookup.missing(len(tokens)) <= 4 and (drafts := lookup.propose(given, len(tokens), 5)):
                text = [*lookup._text]
                assert text == tokens[-len(text) :] and min(64, len(tokens)) <= len(text) < 2 * 64 + 30
                assert [*drafts] == searched(text, config.shortest, 4, 5)[: len(drafts)]
                found += 1
            tokens += [draws.randrange(4) for _ in range(draws.randint(1, 3))]
    assert found > 200 and anew > 5


class Counted(array):  # type: ignore[type-arg]
    """An array that counts looks at its places."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("same_bucket", [False, True])
def test_what_one_proposal_looks_at_is_bounded(same_bucket: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the text says, and also if all its n-grams had one hash."""
    if same_bucket:
        monkeypatch.setattr(speculation, "_hash", lambda *_: 0)
    config = SpeculativeConfig(4, prompt_lookup_max=64, prompt_lookup_min=1)
    apart = [*range(100, 3100)]
    texts = {
        "one token": [5] * 20_000,
        "all but one before are the same": [5] * 63 + [*([6] + [5] * 62)] * 300,
        "the last is far away": [7, *apart, 7],
        "periods that end differently": [one for at in range(300) for one in (*[5] * 40, at % 7 + 9, 5)],
    }
    for name, tokens in texts.items():
        lookup = patient(config)
        proposed(lookup, tokens, 4)
        lookup._before, lookup._text = (Counted(one.typecode, one) for one in (lookup._before, lookup._text))
        drafts = proposed(lookup, tokens, 4)
        looks = lookup._before.looks + lookup._text.looks
        assert 0 < looks <= 64 + 1 + 64 + 3 * 8 + 2 * 64 + 9, (name, looks)
        assert drafts or (name == "the last is far away" and same_bucket), name


def test_the_newest_tokens_count() -> None:
    lookup = PromptLookup(SpeculativeConfig(4, prompt_lookup_max=2))
    tokens = [7, 8, 9, *([5] * 100_000), 7, 8]
    assert proposed(lookup, tokens, 4) == (), "too far back"
    assert len(lookup._text) <= 16_384
    for _ in range(3):
        tokens += [6] * 20_000
        assert proposed(lookup, tokens, 4)
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
