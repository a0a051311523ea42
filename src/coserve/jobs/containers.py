"""Containers of training data: the values that a file or folder holds, each with its place.

| name ends with | container | a value is | place |
|---|---|---|---|
| `.txt` | corpus in UTF-8 | a paragraph between blank lines, as `{"text": ...}` | line |
| `.csv` | table in UTF-8, the first row names the columns | a row, by column | line |
| `.parquet`, or a folder that `datasets` saved | columns (`columns.py`) | a row, by column | row |
| anything else | JSONL in UTF-8 | a line's JSON | line |

`.gz` after any but `.parquet` means that it is compressed. Reading is by the line and by the row, and bounded
by `limits.py`.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from coserve.errors import DataError
from coserve.jobs.columns import column_rows
from coserve.jobs.limits import ReadLimits

Place = str
"""A value's place in its source: "line 7"."""
Values = Iterator[tuple[Place, object | DataError]]
"""Places with a decoded value, or with the reason why there is none."""

_TEXT_COLUMNS: Final = ("prompt", "completion", "chosen", "rejected")  # or messages
_NESTED_COLUMNS: Final = ("messages", "conversations", "history", "preferred_output", "non_preferred_output")
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz", ".csv", ".csv.gz", ".parquet")


def suffix_of(filename: str) -> str:
    """The element of `SUFFIXES` that determines how a file of this name is read."""
    lower = filename.lower()
    packed = ".gz" if lower.endswith(".gz") else ""
    inner = Path(lower.removesuffix(packed)).suffix
    found = f"{inner}{packed}"
    return found if found in SUFFIXES else f".jsonl{packed}"


def has_columns(path: Path) -> bool:
    """Tells whether `path` is a file or folder of columns, which pyarrow reads."""
    return path.is_dir() or suffix_of(path.name) == ".parquet"


def values(path: Path, name: str, expected: str, limits: ReadLimits) -> Values:
    """The values of a file or folder, in order. `name` is the source's name in errors, and `expected`
    describes an object of a wanted format. Raises DataError where the rest cannot be read."""
    if has_columns(path):
        yield from column_rows(path, name, limits)
        return
    suffix = suffix_of(path.name)
    try:
        with ExitStack() as stack:
            lines = _lines(_opened(path, stack), path, name, limits)
            if suffix.startswith(".txt"):
                yield from _paragraphs(lines, name, limits.longest)
            elif suffix.startswith(".csv"):
                yield from _rows(lines, name, limits)
            else:
                yield from _decoded(lines, expected)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: expected a whole gzip file; {error}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    file = stack.enter_context(path.open("rb"))
    if path.suffix.lower() != ".gz":
        return file
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))


def _lines(file: BinaryIO, path: Path, name: str, limits: ReadLimits) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its end) of every line."""
    longest, size, total = limits.longest, path.stat().st_size, 0
    most = limits.most_bytes(size) if path.suffix.lower() == ".gz" else None
    most_rows = limits.most_rows(size)
    for number, line in enumerate(iter(partial(file.readline, longest + 1), b""), 1):
        total += len(line)
        if len(line) > longest:
            raise DataError(f"{name}, line {number}: expected at most {longest} bytes")
        if most is not None and total > most:
            raise DataError(f"{name}, line {number}: expected to unpack to at most {most} bytes")
        if number > most_rows:
            raise DataError(f"{name}, line {number}: expected at most {most_rows} lines")
        try:
            # Some editors begin a file with a byte order mark.
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            found = f"found byte 0x{error.object[error.start]:02x}"
            raise DataError(f"{name}, line {number}: expected UTF-8; {found}") from None


def _decoded(lines: Iterator[tuple[int, str]], expected: str) -> Values:
    """Values of JSON lines; empty lines are passed over."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield f"line {number}", msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            yield f"line {number}", DataError(f"expected {expected}; {error}")


def _paragraphs(lines: Iterator[tuple[int, str]], name: str, longest: int) -> Values:
    """Paragraphs of a corpus, as texts at the places of their first lines."""
    paragraph: list[str] = []
    length = first = 0
    for number, line in lines:
        line = line.rstrip("\r\n")
        if line.strip():
            first = first if paragraph else number
            paragraph.append(line)
            length += len(line)
            if length > longest:
                raise DataError(f"{name}, line {number}: expected a blank line, after {length} characters")
        elif paragraph:
            yield f"line {first}", {"text": "\n".join(paragraph)}
            paragraph, length = [], 0
    if paragraph:
        yield f"line {first}", {"text": "\n".join(paragraph)}


class _BoundedRow:
    """The lines of a table for `csv.reader`, which reads as many as a row has: at most `longest` characters.
    The reader's own bound, on a field, belongs to the whole process, and is left as it is."""

    def __init__(self, lines: Iterator[tuple[int, str]], name: str, longest: int) -> None:
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

    def end_row(self) -> Place:
        """The place of the row that was read."""
        first, self.first, self._length = self.first, 0, 0
        return f"line {first}"


def _rows(lines: Iterator[tuple[int, str]], name: str, limits: ReadLimits) -> Values:
    """Rows of a table, by the columns that its first row names."""
    source = _BoundedRow(lines, name, limits.longest)
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            place = source.end_row()
            if not row:
                continue  # an empty line
            if header is None:
                header = _header(row, name, place, limits.columns)
            elif len(row) != len(header):
                yield place, DataError(f"expected {len(header)} fields, as in the header; found {len(row)}")
            else:
                yield place, _row(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise DataError(f"{name}, line {source.last}: expected comma-separated values; {error}") from None


def _header(row: list[str], name: str, place: Place, most: int) -> list[str]:
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


def _row(row: dict[str, str]) -> object | DataError:
    """A row whose columns of lists are JSON, and columns of text are too where they hold messages."""
    nested = [*_NESTED_COLUMNS, *(["input"] if "preferred_output" in row else [])]
    found: dict[str, object] = {**row}
    for column in nested:
        if not (text := row.get(column, "")).strip():
            found.pop(column, None)
            continue
        try:
            found[column] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            return DataError(f'expected "{column}" to be JSON; {error}')
    for column in _TEXT_COLUMNS:
        if (messages := _messages(row.get(column, ""))) is not None:
            found[column] = messages
    return found


def _messages(text: str) -> list[Any] | None:
    """The messages that a cell holds as JSON; None for other text, even if it looks like it."""
    if not text.lstrip().startswith("[{"):
        return None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    is_chat = isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_chat else None
