"""Regular expressions of tenants, matched in linear time by RE2.

Python's `re` backtracks while holding the interpreter lock: `(a+)+$` on a name of forty letters takes hours.
RE2 releases the lock, and takes time proportional to the pattern's program and the name. Both are bounded: a
pattern by its length and the memory of its program, all patterns of one adapter together by the processor
time that they may take.
"""

import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import re2

from coserve.errors import AdapterError

_T = TypeVar("_T")

LONGEST: Final = 10_000  # characters of a pattern
MOST_SECONDS: Final = 2.0  # of processor time for an adapter's patterns; ordinary ones take a thousandth
_MEMORY: Final = 8 << 20  # bytes of one pattern's program, and of the states it has been in
_REMEMBERED: Final = 32  # adapters whose matches are kept: a job is looked at twice, the second time quickly
_SHOWN: Final = 80  # characters of a pattern in an error
# What `re` has beyond regular expressions, or RE2 reads in another way: (?=...), \1, \Z, a*+, a{,3}, [[:x:]].
_BEYOND: Final = re.compile(r"invalid perl operator|invalid escape sequence|bad repetition operator: .*\+$")
_OTHERWISE: Final = ("{,", "[:")


class UnsupportedPattern(AdapterError):
    """A regular expression that may be valid in Python and cannot be matched in linear time."""


def check_patterns(field: str, patterns: Iterable[str]) -> None:
    """Raises AdapterError for an invalid or too large pattern, UnsupportedPattern for one that cannot be
    matched in linear time; errors name `field`."""
    _first_matches(field, tuple(patterns), ())


def full_matches(field: str, pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Returns the names that `pattern` matches from end to end. Raises what `check_patterns` does."""
    given = tuple(names)
    found = _first_matches(field, (pattern,), given)
    return frozenset(name for name, first in zip(given, found, strict=True) if first is not None)


def first_entries(field: str, entries: Mapping[str, _T], names: Iterable[str]) -> dict[str, _T]:
    """By name the entry of the first pattern that matches all of it or its end after a dot, as PEFT reads
    `rank_pattern`; names that no pattern matches are left out. Raises what `check_patterns` does."""
    given, values = tuple(names), tuple(entries.values())
    if not entries:
        return {}
    found = _first_matches(field, tuple(entries), given, ending=True)
    return {name: values[first] for name, first in zip(given, found, strict=True) if first is not None}


def linear_pattern(field: str, pattern: str, memory: int) -> Any:
    """A compiled pattern for texts in UTF-8 whose characters are bytes to it; its program and the states it
    has been in may take `memory` bytes. Raises what `check_patterns` does."""
    return _compiled(field, pattern, False, memory)


@lru_cache(_REMEMBERED)
def _first_matches(
    field: str, patterns: tuple[str, ...], names: tuple[str, ...], ending: bool = False
) -> tuple[int | None, ...]:
    """For each name the index of the first pattern that matches it. Patterns run one at a time, so that only
    one's states are in memory."""
    found: dict[str, int] = {}
    # What coserve writes stands for one name each: a file of a thousand such patterns is read at once.
    exact = {f"^{re.escape(name)}$": name for name in names}
    until = time.thread_time() + MOST_SECONDS
    for number, pattern in enumerate(patterns):
        if pattern in exact:
            found.setdefault(exact[pattern], number)
            continue
        compiled = _compiled(field, pattern, ending)
        for name in names or ("",):
            if name not in found and compiled.fullmatch(name.encode()) is not None:
                found[name] = number
            if time.thread_time() > until:
                raise AdapterError(f"{field}: its regular expressions take too long to be matched")
    return tuple(found.get(name) for name in names)


def _compiled(field: str, pattern: str, ending: bool, memory: int = _MEMORY) -> Any:
    shown = f"{field}: {pattern[:_SHOWN]!r}{'...' * (len(pattern) > _SHOWN)}"
    if len(pattern) > LONGEST:
        raise AdapterError(f"{shown} has {len(pattern)} characters; a regular expression may have {LONGEST}")
    for special in _OTHERWISE:
        if special in pattern:
            raise UnsupportedPattern(f"{shown} is not supported: {special!r} means different things")
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # bytes, so that \w is one state and not hundreds
    options.max_mem, options.never_capture, options.log_errors = memory, True, False
    try:
        compiled = re2.compile(pattern.encode(), options)
        if ending:  # after the pattern itself: "a)|(b" is none, and would be one within brackets
            compiled = re2.compile(f"(?:.*\\.)?(?:{pattern})".encode(), options)
    except UnicodeEncodeError as error:
        raise AdapterError(f"{shown} is no text") from error
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "it cannot be read"
        if _BEYOND.match(reason):
            raise UnsupportedPattern(
                f"{shown} is not supported: {reason[:_SHOWN]} cannot be matched in linear time; "
                "list the modules instead"
            ) from error
        raise AdapterError(
            f"{shown} is no regular expression that can be matched: {reason[:_SHOWN]}"
        ) from error
    finally:
        re2.purge()  # it would remember the last 128, each with the memory of its states
    return compiled
