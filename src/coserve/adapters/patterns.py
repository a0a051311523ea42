"""Regular expressions of tenants, matched in linear time by RE2.

Python's `re` backtracks while holding the interpreter lock: `(a+)+$` on a name of forty letters takes hours.
RE2 releases the lock, and takes time proportional to the pattern's program and the name. Both are bounded: a
pattern by its length and the memory of its program, all patterns of one adapter together by the processor
time that they may take.

What RE2 lacks (lookahead, backreferences) a finished adapter's configuration may have all the same: there
Python's `re` matches it, in a child process with a limit of time.
"""

import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import re2

from coserve.adapters.backtracking import first_matches
from coserve.errors import AdapterError, LimitExceeded
from coserve.sandbox.pool import SandboxPool

_T = TypeVar("_T")

LONGEST: Final = 10_000  # characters of a pattern
MOST_SECONDS: Final = 2.0  # of processor time for an adapter's patterns; ordinary ones take a thousandth
CHILD_SECONDS: Final = 0.5  # the same in the child process, where a thousand names take a hundredth of it
_CHILD_MEMORY: Final = 64 << 20  # bytes that the child may take
# As many as threads load adapters: none waits for the patterns of another.
_CHILD: Final = SandboxPool("coserve.adapters.backtracking:first_matches", 4, _CHILD_MEMORY)
# What PEFT puts around a pattern: none, in `rank_pattern`, in `layers_pattern`.
_WHOLE: Final = "{}"
_ENDING: Final = r"(.*\.)?({})$"
_LAYERS: Final = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_PLAIN: Final = re.compile(r"[\w.]*")  # patterns that cannot take long
_MEMORY: Final = 8 << 20  # bytes of one pattern's program, and of the states it has been in
_REMEMBERED: Final = 32  # adapters whose matches are kept: a job is looked at twice, the second time quickly
_SHOWN: Final = 80  # characters of a pattern in an error
_LONGEST_NUMBER: Final = 10  # digits of a layer's number in a module's name
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


def peft_matches(field: str, pattern: str, names: Iterable[str]) -> frozenset[str]:
    """`full_matches` of a file's pattern, which may have all that Python's `re` has."""
    given = tuple(names)
    try:
        return full_matches(field, pattern, given)
    except UnsupportedPattern:
        found = _backtracked(field, _WHOLE, (pattern,), given)
        return frozenset(name for name, one in zip(given, found, strict=True) if one is not None)


def peft_entries(field: str, entries: Mapping[str, _T], names: Iterable[str]) -> dict[str, _T]:
    """`first_entries` of a file's patterns, which may have all that Python's `re` has."""
    given = tuple(names)
    try:
        return first_entries(field, entries, given)
    except UnsupportedPattern:
        values = tuple(entries.values())
        found = _backtracked(field, _ENDING, tuple(entries), given)
        return {name: values[one[0]] for name, one in zip(given, found, strict=True) if one is not None}


def peft_layers(field: str, patterns: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    """By name the number after the first pattern that is found in it, as PEFT reads `layers_pattern`; names
    without one are left out. Raises AdapterError for patterns that take too long."""
    given = tuple(names)
    found = _backtracked(field, _LAYERS, tuple(patterns), given)
    return {
        name: int(one[1])
        for name, one in zip(given, found, strict=True)
        if one is not None and one[1] is not None and len(one[1]) < _LONGEST_NUMBER
    }


@lru_cache(_REMEMBERED)
def _backtracked(
    field: str, form: str, patterns: tuple[str, ...], names: tuple[str, ...]
) -> list[tuple[int, str | None] | None]:
    """Results of `backtracking.first_matches`, from the child process unless no pattern can take long."""
    for pattern in patterns:
        _expect_short(field, pattern)
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise AdapterError(f"{_shown(field, pattern)} is no text") from error
    if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return first_matches(form, patterns, names)
    try:
        return list(_CHILD.call(form, patterns, names, seconds=CHILD_SECONDS))
    except LimitExceeded as error:
        raise AdapterError(f"{field}: its regular expressions cannot be matched: {error}") from error
    except AdapterError as error:
        raise AdapterError(f"{field}: {error}") from error


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


def _shown(field: str, pattern: str) -> str:
    return f"{field}: {pattern[:_SHOWN]!r}{'...' * (len(pattern) > _SHOWN)}"


def _expect_short(field: str, pattern: str) -> None:
    if len(pattern) > LONGEST:
        raise AdapterError(
            f"{_shown(field, pattern)} has {len(pattern)} characters; a regular expression may have {LONGEST}"
        )


def _compiled(field: str, pattern: str, ending: bool, memory: int = _MEMORY) -> Any:
    shown = _shown(field, pattern)
    _expect_short(field, pattern)
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
