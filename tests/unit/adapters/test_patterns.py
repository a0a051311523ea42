"""Regular expressions of tenants: what `re` says of them, in a time that is bounded."""

import random
import re

import pytest

from coserve.adapters import patterns
from coserve.adapters.patterns import UnsupportedPattern, check_patterns, first_entries, full_matches
from coserve.errors import AdapterError

_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.experts.1.down_proj", "mlp.c_fc")
NAMES = [f"{root}.{layer}.{linear}" for root in ("model.layers", "transformer.h") for layer in (0, 1, 11)
         for linear in _LINEARS] + ["lm_head", "model.embed_tokens"]  # fmt: skip


def ordinary(draws: random.Random) -> str:
    """As people write them: names, dots, numbers, choices, repeats, anchors."""
    word = draws.choice(
        ["q_proj", "proj", "layers", "h", "mlp", "model", "self_attn", "lm_head", "down_proj"]
    )
    atoms = [
        word, re.escape(f"layers.{draws.randrange(12)}."), r"\.", ".", ".*", ".*?", r"\d+", r"[0-9]", r"\w*",
        "[a-z_]+", "[^.]*", r"\b", "^", "$", f"({word}|k_proj|o_proj)", f"(?:{word}|.*)?", r"(\d{1,2})",
        r"[qkv]_proj", "_proj", "-", r"\S", r"\D+", "a|b", "(0|1|11)", "x{2,}", f"(?:{word})*", "[01]{1,2}",
    ]  # fmt: skip
    whole = "".join(draws.choice(atoms) for _ in range(draws.randint(1, 6)))
    whole = draws.choice(["", ".*"]) + whole + draws.choice(["", ".*", "_proj"])
    return f"(?i){whole.upper()}" if draws.random() < 0.05 and "\\" not in whole else whole


def test_ordinary_patterns_match_what_python_matches() -> None:
    draws, compared, matched = random.Random(0), 0, 0
    for _ in range(1500):
        pattern = ordinary(draws)
        try:
            expected = {name for name in NAMES if re.fullmatch(pattern, name)}
        except re.error:
            with pytest.raises(AdapterError):
                full_matches("target_modules", pattern, NAMES)
            continue
        assert full_matches("target_modules", pattern, NAMES) == expected, pattern
        compared, matched = compared + 1, matched + bool(expected)
    assert compared > 1200 and matched > 200


def test_the_first_pattern_that_a_name_ends_with_as_in_peft() -> None:
    draws, chosen = random.Random(1), 0
    for _ in range(300):
        entries = {ordinary(draws).removeprefix("(?i)"): number for number in range(draws.randint(1, 5))}
        for name in draws.sample(NAMES, 3):
            entries[f"^{re.escape(name)}$"] = -1
        expected = {}
        for name in NAMES:  # peft.utils.other.get_pattern_key
            keys = (key for key in entries if re.match(rf"(.*\.)?({key})$", name))
            if (key := next(keys, None)) is not None:
                expected[name] = entries[key]
        assert first_entries("rank_pattern", entries, NAMES) == expected, entries
        chosen += len(expected)
    assert chosen > 1000


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!.*lm_head).*q_proj", r"(a)\1", r"a\Z", "a*+b", "(?<=x)y", "a{,3}", "(?P=x)", "[[:alpha:]]"],
)
def test_what_takes_more_than_linear_time_is_not_supported(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern, match=r"^rank_pattern: '.*is not supported"):
        check_patterns("rank_pattern", ["q_proj", pattern])


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "regular expression"), ("a)|(b", "regular expression"), ("[a", "regular expression"),
        ("*", "regular expression"), ("(a{1000}){1000}", "regular expression"), ("\ud800", "no text"),
        ("a" * 10_001, "10001 characters"),
        ("[^ab]{1000}" * 900, "regular expression"),
    ],
)  # fmt: skip
def test_what_is_none_or_too_large_is_refused_in_a_short_sentence(pattern: str, said: str) -> None:
    with pytest.raises(AdapterError, match=said) as refusal:
        check_patterns("alpha_pattern", [pattern])
    assert str(refusal.value).startswith("alpha_pattern: ") and len(str(refusal.value)) < 300
    assert type(refusal.value) is AdapterError


def test_many_patterns_may_take_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f".*{number}.*q" for number in range(50)]
    check_patterns("rank_pattern", many)
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.0)
    with pytest.raises(AdapterError, match="too long"):
        check_patterns("rank_pattern", [*many, "z"])
