"""Speculative decoding by prompt lookup: settings, and what drafts one sequence's next tokens.

An answer that copies from its prompt, or repeats itself, goes on as it did after the last occurrence of its
newest n-gram. Tokens that followed there are drafts: the step that computes the newest token verifies them.
"""

import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from coserve.errors import ConfigError

_MOST: Final = 64  # drafts, and tokens of an n-gram
_WINDOW: Final = 16_384  # newest tokens in which n-grams are found: what an index may take is bounded
_TRIES: Final = 8  # occurrences of the shortest n-gram that are looked at
_PASSED: Final = 64  # n-grams of one bucket that are passed by in search of them
NEW_TOKENS: Final = _MOST + 1  # most tokens that one step brings, which a proposal reads by itself
_PRIOR: Final = 1.2, 2.0  # drafts that held, of so many
_KEPT: Final = 0.8  # of what was learned, after each verification
_FORGOTTEN: Final = 0.02  # of it, for each token without one
_LEAST: Final = 0.3  # chance to be reached of the last draft: a row costs a part of a step
_LONGEST_REST: Final = 32  # tokens without drafts after several in a row of which none held


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculative decoding, by vLLM's names. An n-gram has `prompt_lookup_min` to
    `prompt_lookup_max` tokens, the longest that is found; where one of the two is None it is the other, and
    both are 5 where both are."""

    num_speculative_tokens: int  # most drafts of a sequence in a step
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(
                f"engine.speculative_config: method must be ngram, which needs no second model, "
                f"not {self.method!r}"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            is_open = value is None and name != "num_speculative_tokens"
            if not is_open and (type(value) is not int or not 1 <= value <= _MOST):
                raise ConfigError(
                    f"engine.speculative_config: {name} must be between 1 and {_MOST}, not {value!r}"
                )
        if self.shortest > self.longest:
            raise ConfigError(
                f"engine.speculative_config: prompt_lookup_min of {self.shortest} is above prompt_lookup_max "
                f"of {self.longest}"
            )

    @classmethod
    def read(cls, value: str | Mapping[str, Any]) -> "SpeculativeConfig | None":
        """From JSON or a mapping; None where it is empty. Raises ConfigError."""
        try:
            given = json.loads(value) if isinstance(value, str) and value else value
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"engine.speculative_config is not JSON: {error}") from error
        if not given:
            return None
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or (unknown := [name for name in given if name not in known]):
            wrong = f"{unknown[0]!r} is none of them" if isinstance(given, Mapping) else f"not {given!r}"
            raise ConfigError(f"engine.speculative_config has the fields {', '.join(known)}: {wrong}")
        if "num_speculative_tokens" not in given:
            raise ConfigError("engine.speculative_config needs num_speculative_tokens")
        return cls(**given)

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @property
    def shortest(self) -> int:
        """Tokens of the shortest n-gram."""
        return self.prompt_lookup_min or self.longest


class PromptLookup:
    """Drafts one sequence's next tokens, and learns how many of them hold.

    An index has the places of n-grams of the shortest length: for each bucket of their hashes the last one,
    and for each place the one before it in its bucket. So a token is read in constant time, and a proposal
    looks at a bounded number of places, however long the text is and whatever it says. Each token takes some
    12 bytes. The hash is Python's of bytes, whose key nobody outside of the process knows.
    """

    __slots__ = (
        "_before", "_config", "_hits", "_last", "_mask", "_pause", "_read", "_rests_until", "_text",
        "_trials", "under_way",
    )  # fmt: skip

    def __init__(self, config: SpeculativeConfig, longest: int = _WINDOW) -> None:
        """For a sequence of at most `longest` tokens, by which the index has buckets."""
        self.under_way = 0  # drafts in a plan without a result
        self._config = config
        self._read = 0  # tokens of the sequence, of which the text has the newest
        self._mask = (1 << (min(longest, _WINDOW) - 1).bit_length()) - 1
        self._hits, self._trials = _PRIOR
        self._pause = self._rests_until = 0
        self._begin()

    @property
    def rate(self) -> float:
        """Share of drafts that held lately, where those before them did."""
        return self._hits / self._trials

    def expected(self, drafts: int) -> float:
        """Number of so many drafts that are expected to hold."""
        rate = self.rate
        return sum(rate**number for number in range(1, drafts + 1))

    def missing(self, known: int) -> int:
        """Tokens that have to be read before a proposal of what follows `known` tokens."""
        return min(known - self._read, _WINDOW)

    def read(self, tokens: Callable[[int, int], list[int]], known: int, most: int) -> None:
        """Reads at most `most` of the first `known` tokens, which `tokens` gives by start and number."""
        if known - self._read > _WINDOW or len(self._text) >= 2 * _WINDOW:
            self._read = max(known - _WINDOW, 0)
            self._begin()
        count = min(known - self._read, most)
        self._text.extend(tokens(self._read, count))
        self._read += count
        size, first = self._config.shortest, len(self._text) - count
        for end in range(max(first + 1, size), len(self._text) + 1):
            bucket = _hash(self._text, end - size, end) & self._mask
            self._before.append(self._last[bucket])
            self._last[bucket] = end

    def propose(self, tokens: Callable[[int, int], list[int]], known: int, most: int) -> tuple[int, ...]:
        """At most `most` drafts of what follows `known` tokens, which `tokens` gives by start and number.

        There are none where nothing is found, where drafts have not held lately, or where more than
        NEW_TOKENS are missing.
        """
        if known > self._read:
            if self.missing(known) > NEW_TOKENS:
                return ()
            self._forget()
            self.read(tokens, known, NEW_TOKENS)
        if self._read < known or known < self._rests_until or self.rate < _LEAST:
            return ()
        most = min(most, self._config.num_speculative_tokens)
        if self.rate < 1.0:
            most = min(most, int(math.log(_LEAST) / math.log(self.rate)))
        follows = self._find() if most > 0 else None
        if follows is None:
            return ()
        drafts = self._text[follows : follows + most]
        while len(drafts) < most:  # a repetition goes on
            drafts.append(drafts[follows + len(drafts) - len(self._text)])
        return tuple(drafts)

    def learn(self, drafts: int, held: int) -> None:
        """Learns that `held` of so many drafts held, and that no plan has any now."""
        self.under_way = 0
        self._hits = self._hits * _KEPT + held
        self._trials = self._trials * _KEPT + held + (held < drafts)
        self._pause = 0 if held else min(2 * self._pause + 1, _LONGEST_REST)
        self._rests_until = self._read + self._pause + 1

    def _begin(self) -> None:
        """Forgets the text."""
        self._text, self._before = array("I"), array("i")
        self._last = array("i", (-1,)) * (self._mask + 1)

    def _forget(self) -> None:
        """Forgets a little of what was learned before tokens that are new."""
        hits, trials = _PRIOR
        self._hits += (hits - self._hits) * _FORGOTTEN
        self._trials += (trials - self._trials) * _FORGOTTEN

    def _find(self) -> int | None:
        """The place behind the last occurrence of the longest n-gram at the end; None where there is none."""
        text, size, before = self._text, self._config.shortest, self._before
        end = len(text)
        if end < size:
            return None
        gram, more = text[end - size :], self._config.longest - size
        found, best, tries = None, -1, _TRIES
        at = end
        for _ in range(_PASSED):
            at = before[at - size]
            if at < 0:
                break
            if text[at - size : at] != gram:  # another one of the bucket
                continue
            if at - size > best and _ends_alike(text, at - size, end - size, best + 1):
                found, best = at, best + 1
                while (
                    best < min(more, at - size) and text[at - size - best - 1] == text[end - size - best - 1]
                ):
                    best += 1
            tries -= 1
            if best == more or not tries:
                break
        return found


def _hash(text: "array[int]", start: int, end: int) -> int:
    return hash(text[start:end].tobytes())


def _ends_alike(text: "array[int]", one: int, other: int, count: int) -> bool:
    """Tells whether the `count` tokens before two places are the same."""
    return text[one - count : one] == text[other - count : other]
