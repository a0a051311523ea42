"""Regular expressions as Python's `re` matches them, for a child process (`sandbox/`): it may take hours."""

import re
from collections.abc import Sequence

from coserve.errors import AdapterError


def first_matches(
    form: str, patterns: Sequence[str], names: Sequence[str]
) -> list[tuple[int, str | None] | None]:
    """For each name the index of the first pattern that matches it, and its group "idx" if it has one.

    `form` is the expression around a pattern, with `{}` in its place; the pattern alone has to match all of a
    name, any other form a beginning. Raises AdapterError for a pattern that is none.
    """
    found: list[tuple[int, str | None] | None] = [None] * len(names)
    for number, pattern in enumerate(patterns):
        try:
            compiled = re.compile(form.replace("{}", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"{pattern[:80]!r} is no regular expression: {str(error)[:80]}") from error
        match = compiled.fullmatch if form == "{}" else compiled.match
        for place, name in enumerate(names):
            if found[place] is None and (one := match(name)) is not None:
                found[place] = number, one.groupdict().get("idx")
    return found
