"""Tables of values between commas, semicolons or tabs: the rows of their lines, by column."""

import csv
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import msgspec

from coserve.errors import DataError
from coserve.jobs.limits import ReadLimits

# Columns of text, which may hold messages too, and columns of lists, in any letter case.
_TEXT_COLUMNS: Final = ("prompt", "completion", "response", "chosen", "rejected")
_NESTED_COLUMNS: Final = ("messages", "conversations", "history", "preferred_output", "non_preferred_output")
_DELIMITERS: Final = {",": "comma", ";": "semicolon", "\t": "tab"}
_QUOTED: Final = re.compile(r'"[^"]*+"?')
_CHAT_KEYS: Final = (frozenset(("role", "content")), frozenset(("from", "value")))

Line = tuple[int, str]


class _BoundedRow:
    """The lines of a table for `csv.reader`, which reads as many as a row has: at most `longest` characters.
    The reader's own bound, on a field, belongs to the whole process, and is left as it is."""

    def __init__(self, lines: Iterator[Line], name: str, longest: int) -> None:
        self._lines, self._name, self._longest = lines, name, longest
        self._length = 0
        self.first = self.last = 0  # lines of the row

    def __iter__(self) -> "_BoundedRow":
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        self.first, self.last = self.first or number, number
        self._length += len(line)
        if self._length > self._longest:
            raise DataError(
                f"{self._name}, line {number}: expected a row of at most {self._longest} characters"
            )
        return line

    def end_row(self) -> str:
        """The place of the row that was read."""
        first, self.first, self._length = self.first, 0, 0
        return f"line {first}"


def rows(
    lines: Iterator[Line], name: str, limits: ReadLimits, usual: str = ","
) -> Iterator[tuple[str, object | DataError]]:
    """(place, row by column) of each row, or the reason why there is none. The first line that is not empty
    names the columns, and tells what is between them: `usual` where that is not clear."""
    head = next((line for line in lines if line[1].strip()), None)
    if head is None:
        return
    delimiter = _delimiter(head[1], usual)
    source = _BoundedRow(chain([head], lines), name, limits.longest)
    reader = csv.reader(source, strict=True, delimiter=delimiter)
    header: list[str] | None = None
    try:
        for row in reader:
            place = source.end_row()
            if not row:
                continue  # an empty line
            if header is None:
                header = _header(row, name, place, limits.columns)
                nested, texts = _columns_of(header)
            elif len(row) != len(header):
                yield place, DataError(f"expected {len(header)} fields, as in the header; found {len(row)}")
            else:
                yield place, _row(dict(zip(header, row, strict=True)), nested, texts)
    except csv.Error as error:
        kind = f"{_DELIMITERS[delimiter]}-separated values"
        raise DataError(f"{name}, line {source.last}: expected {kind}; {error}") from None


def _delimiter(header: str, usual: str) -> str:
    """The delimiter that is most often between names of columns; `usual` for one column and for a tie."""
    outside = _QUOTED.sub("", header)
    return max((usual, *_DELIMITERS), key=outside.count)


def _header(row: list[str], name: str, place: str, most: int) -> list[str]:
    if len(row) > most:
        raise DataError(f"{name}, {place}: expected at most {most} columns; found {len(row)}")
    columns, known = [column.strip() for column in row], set[str]()
    for column in columns:
        if column in known:
            raise DataError(
                f"{name}, {place}: expected different names of columns; found {column[:60]!r} twice"
            )
        known.add(column)
    return columns


def _columns_of(header: list[str]) -> tuple[list[str], list[str]]:
    """The columns of lists, and those of text that may hold messages."""
    names = {column: column.lower() for column in header}
    lists = {*_NESTED_COLUMNS, *(["input"] if "preferred_output" in names.values() else [])}
    return (
        [column for column, name in names.items() if name in lists],
        [column for column, name in names.items() if name in _TEXT_COLUMNS],
    )


def _row(row: dict[str, str], nested: list[str], texts: list[str]) -> object | DataError:
    """A row whose columns of lists are JSON, and columns of text are too where they hold messages."""
    found: dict[str, object] = {**row}
    for column in nested:
        if not (text := row[column]).strip():
            del found[column]
            continue
        try:
            found[column] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            return DataError(f'expected "{column}" to be JSON; {error}')
    for column in texts:
        if (messages := _messages(row[column])) is not None:
            found[column] = messages
    return found


def _messages(text: str) -> Any:
    """The message or messages that a cell holds as JSON; None for other text, even if it looks like it."""
    if not text.lstrip().startswith(("[{", '{"')):
        return None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(found, dict):
        return found if found.keys() in _CHAT_KEYS else None
    is_chat = all(isinstance(one, dict) and ("role" in one or one.keys() == _CHAT_KEYS[1]) for one in found)
    return found if is_chat else None
