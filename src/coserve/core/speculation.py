"""Speculative decoding by prompt lookup: settings, and what drafts one sequence's next tokens.

An answer that copies from its prompt, or repeats itself, goes on as it did after the last occurrence of its
newest n-gram. Tokens that followed there are drafts: the step that computes the newest token verifies them.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from coserve.errors import ConfigError

_MOST: Final = 64  # drafts, and tokens of an n-gram
_WINDOW: Final = 16_384  # newest tokens in which n-grams are found: the time of each step is bounded
_TRIES: Final = 8  # occurrences of the shortest n-gram that are looked at
_LARGEST: Final = 0x10FFFF  # code point
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

    Tokens are the characters of a string, in which Python finds n-grams without a loop.
    """

    __slots__ = ("_config", "_hits", "_pause", "_read", "_rests_until", "_text", "_trials", "under_way")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.under_way = 0  # drafts in a plan without a result
        self._config = config
        self._text, self._read = "", 0  # the newest tokens, of so many that have been read
        self._hits, self._trials = _PRIOR
        self._pause = self._rests_until = 0

    @property
    def rate(self) -> float:
        """Share of drafts that held lately, where those before them did."""
        return self._hits / self._trials

    def expected(self, drafts: int) -> float:
        """Number of so many drafts that are expected to hold."""
        rate = self.rate
        return sum(rate**number for number in range(1, drafts + 1))

    def propose(self, tokens: Callable[[int, int], list[int]], known: int, most: int) -> tuple[int, ...]:
        """At most `most` drafts of what follows `known` tokens, which `tokens` gives by start and number.

        There are none where nothing is found, or where drafts have not held lately.
        """
        if known > self._read:
            self._take(tokens, known)
        if known < self._rests_until or self.rate < _LEAST:
            return ()
        most = min(most, self._config.num_speculative_tokens)
        if self.rate < 1.0:
            most = min(most, int(math.log(_LEAST) / math.log(self.rate)))
        follows = self._find() if most > 0 else None
        if follows is None:
            return ()
        drafts = self._text[follows : follows + most]
        while len(drafts) < most:  # a repetition goes on
            drafts += drafts[follows + len(drafts) - len(self._text)]
        return tuple(map(ord, drafts))

    def learn(self, drafts: int, held: int) -> None:
        """Learns that `held` of so many drafts held, and that no plan has any now."""
        self.under_way = 0
        self._hits = self._hits * _KEPT + held
        self._trials = self._trials * _KEPT + held + (held < drafts)
        self._pause = 0 if held else min(2 * self._pause + 1, _LONGEST_REST)
        self._rests_until = self._read + self._pause + 1

    def _take(self, tokens: Callable[[int, int], list[int]], known: int) -> None:
        """Reads the tokens that are new, and forgets a little of what was learned before them."""
        hits, trials = _PRIOR
        self._hits += (hits - self._hits) * _FORGOTTEN
        self._trials += (trials - self._trials) * _FORGOTTEN
        start = max(self._read, known - _WINDOW)
        self._text += "".join(chr(min(token, _LARGEST)) for token in tokens(start, known - start))
        self._read = known
        if len(self._text) > 2 * _WINDOW:
            self._text = self._text[-_WINDOW:]

    def _find(self) -> int | None:
        """The place behind the last occurrence of the longest n-gram at the end; None where there is none."""
        text, shortest = self._text, self._config.shortest
        end, more = len(text), self._config.longest - shortest
        gram = text[end - shortest :]
        found, best = None, -1
        at = text.rfind(gram, 0, end - 1) if end > shortest else -1
        for _ in range(_TRIES):
            if at < 0:
                break
            same = 0
            while same < min(more, at) and text[at - same - 1] == text[end - shortest - same - 1]:
                same += 1
            if same > best:
                found, best = at + shortest, same
            if same == more:
                break
            at = text.rfind(gram, 0, at + shortest - 1)
        return found
