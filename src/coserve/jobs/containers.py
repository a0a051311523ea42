"""Containers of training data: the values that a file or folder holds, each with its place.

| name ends with | container | a value is | place |
|---|---|---|---|
| `.txt` | corpus in UTF-8 | a paragraph between blank lines, as `{"text": ...}` | line |
| `.csv`, `.tsv` | table in UTF-8 (`tables.py`) | a row, by column | line |
| `.parquet`, or a folder that `datasets` saved | columns (`columns.py`) | a row, by column | row |
| anything else | JSONL in UTF-8 | a line's JSON | line |
| anything else that begins with `[`, or `{"data": [` | array (`arrays.py`) | an element | record and line |

Text in UTF-16 with a byte order mark is read too. `.gz` after any but `.parquet` means that it is compressed.
Reading is by the line, the row and the element, and bounded by `limits.py`.
"""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from coserve.errors import DataError
from coserve.jobs.arrays import Elements
from coserve.jobs.borders import cut_text
from coserve.jobs.columns import column_rows
from coserve.jobs.limits import ReadLimits
from coserve.jobs.tables import rows

Place = str
"""A value's place in its source: "line 7"."""
Values = Iterator[tuple[Place, object | DataError]]
"""Places with a decoded value, or with the reason why there is none."""

_HEAD: Final = 2**16  # bytes of a file's beginning, and of an array that are read at once
# The beginning of an object whose key "data" has a list of objects, behind others with short values.
_DATA: Final = re.compile(
    rb'\s*+\{(?:\s*+"[^"\\]*+"\s*+:\s*+(?:"[^"\\]*+"|[\w.+-]++)\s*+,)*+\s*+"data"\s*+:\s*+(?=\[\s*\{)'
)
_ASKS: Final = frozenset(("prompt", "messages", "question"))
# Other files by their first bytes, and advice for a person who has one.
_FOREIGN: Final = {
    codecs.BOM_UTF32_LE: "text in UTF-32: save it as UTF-8",
    codecs.BOM_UTF32_BE: "text in UTF-32: save it as UTF-8",
    b"\x1f\x8b": "a gzip file: let its name end with .gz",
    b"\x28\xb5\x2f\xfd": "a Zstandard file: unpack it",
    b"PK\x03\x04": "a zip file or a workbook: unpack it, or save its sheet as CSV",
    b"PAR1\x15": "a Parquet file: let its name end with .parquet",
    b"ARROW1\0\0": "an Arrow file: save it as Parquet",
}
_CONTAINERS: Final = {
    ".jsonl": "JSON lines",
    ".txt": "a text of paragraphs",
    ".csv": "a table",
    ".tsv": "a table",
}
SUFFIXES: Final = (
    ".jsonl", ".jsonl.gz", ".txt", ".txt.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet",
)  # fmt: skip


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


def values(path: Path, name: str, limits: ReadLimits) -> Values:
    """The values of a file or folder, in order. `name` is the source's name in errors. Raises
    DataError where the rest cannot be read."""
    if has_columns(path):
        yield from column_rows(path, name, limits)
        return
    suffix = suffix_of(path.name)
    try:
        with ExitStack() as stack:
            head = _head(path)
            file = _opened(path, stack)
            for beginning, found in _FOREIGN.items():
                if head.startswith(beginning):
                    raise DataError(f"{name}: expected UTF-8; found {found}")
            if suffix.startswith(".jsonl") and (wrapper := _wrapper(head)) is not None:
                yield from _elements(file, path, name, limits, wrapper)
                return
            is_text = suffix.startswith(".txt")
            lines = _lines(file, path, name, limits, is_text)
            if is_text:
                yield from _paragraphs(lines, limits.longest)
            elif suffix.startswith((".csv", ".tsv")):
                yield from rows(lines, name, limits, "\t" if suffix.startswith(".tsv") else ",")
            else:
                yield from _decoded(lines, name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: expected a whole gzip file, as its name ends with .gz; {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: expected UTF-16, as its first bytes say; {error.reason}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


def container_of(path: Path) -> str:
    """The name of a file's or folder's container, for people. Raises OSError."""
    if has_columns(path):
        return "a folder of datasets" if path.is_dir() else "Parquet"
    suffix = suffix_of(path.name)
    is_array = suffix.startswith(".jsonl") and _wrapper(_head(path)) is not None
    kind = "a JSON array" if is_array else _CONTAINERS[suffix.removesuffix(".gz")]
    return f"{kind}, compressed" if suffix.endswith(".gz") else kind


def _wrapper(head: bytes) -> bytes | None:
    """The bytes of a file before an array of objects that it consists of: none, or the beginning of an object
    whose key "data" has them. None for other files, and for a line that is a record with such a key."""
    text = head.removeprefix(codecs.BOM_UTF8)
    if text.lstrip().startswith(b"["):
        return b""
    if (found := _DATA.match(text)) is None:
        return None
    try:
        first = msgspec.json.decode(text.lstrip().partition(b"\n")[0])
    except (msgspec.DecodeError, RecursionError):
        return found[0]
    return None if isinstance(first, dict) and _ASKS & first.keys() else found[0]


def _head(path: Path) -> bytes:
    """The beginning of a file as it is read: unpacked, and in UTF-8."""
    with ExitStack() as stack:
        return _opened(path, stack).read(_HEAD)


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    file: BinaryIO = stack.enter_context(path.open("rb"))
    if path.suffix.lower() == ".gz":
        file = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
    beginning = file.read(4)
    file.seek(0)
    is_utf32 = beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
    if is_utf32 or not beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return file
    return stack.enter_context(io.BufferedReader(_FromUtf16(file), _HEAD))


class _FromUtf16(io.RawIOBase):
    """The bytes of a file in UTF-16 as UTF-8, without its byte order mark. Raises UnicodeDecodeError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder, self._left = file, codecs.getincrementaldecoder("utf-16")(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = self._file.read(_HEAD)
            self._left = self._decoder.decode(chunk, final=not chunk).encode()
            if not chunk:
                break
        part = self._left[: len(buffer)]
        buffer[: len(part)] = part
        self._left = self._left[len(part) :]
        return len(part)


def _lines(
    file: BinaryIO, path: Path, name: str, limits: ReadLimits, in_parts: bool
) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its end) of every line. One that is too long comes `in_parts` of that number,
    of which the last has the end, or is refused."""
    longest, size, total = limits.longest, path.stat().st_size, 0
    most = limits.most_bytes(size) if path.suffix.lower() == ".gz" else None
    most_rows = limits.most_rows(size)
    # Some editors begin a file with a byte order mark. A part may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number, is_first = 0, True
    while line := file.readline(longest + 1):
        number += is_first
        total += len(line)
        is_long, is_first = len(line) > longest, line.endswith(b"\n")
        if is_long and not in_parts:
            raise DataError(f"{name}, line {number}: expected at most {longest} bytes: split this record")
        if most is not None and total > most:
            raise DataError(f"{name}, line {number}: expected to unpack to at most {most} bytes: split it")
        if number > most_rows:
            raise DataError(f"{name}, line {number}: expected at most {most_rows} lines: split the file")
        try:
            yield number, decoder.decode(line, final=not is_long)
        except UnicodeDecodeError as error:
            found = f"found byte 0x{error.object[error.start]:02x}: save the file as UTF-8"
            raise DataError(f"{name}, line {number}: expected UTF-8; {found}") from None


def _decoded(lines: Iterator[tuple[int, str]], name: str) -> Values:
    """Values of JSON lines; empty lines are passed over. Raises DataError where the first one goes on in the
    next line, as all of them would."""
    is_first = True
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield f"line {number}", msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            if is_first and line.strip() == "{":
                raise DataError(
                    f"{name}, line {number}: expected whole objects, one in each line, or one list of them, "
                    "[{...}, {...}]; this object goes on in the next line"
                ) from None
            yield f"line {number}", DataError(f"expected one JSON object in this line; {error}")
        is_first = False


def _elements(file: BinaryIO, path: Path, name: str, limits: ReadLimits, wrapper: bytes) -> Values:
    """Values of an array, behind the bytes of its `wrapper`. Raises DataError for a malformed one: where the
    next begins is not certain then."""
    size = path.stat().st_size
    chunks = _chunks(file, path, name, limits)
    elements = Elements(chunks, name, limits, limits.most_rows(size), wrapper)
    for element in elements:
        place = elements.place
        try:
            yield place, msgspec.json.decode(element.decode())
        except UnicodeDecodeError as error:
            found = f"found byte 0x{error.object[error.start]:02x}: save the file as UTF-8"
            raise DataError(f"{name}, {place}: expected UTF-8; {found}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{name}, {place}: expected one JSON object; {error}") from None


def _chunks(file: BinaryIO, path: Path, name: str, limits: ReadLimits) -> Iterator[bytes]:
    """The file's bytes without a byte order mark."""
    total = 0
    most = limits.most_bytes(path.stat().st_size) if path.suffix.lower() == ".gz" else None
    for chunk in iter(partial(file.read, _HEAD), b""):
        is_first = not total
        total += len(chunk)
        if most is not None and total > most:
            raise DataError(f"{name}: expected to unpack to at most {most} bytes: split it")
        yield chunk.removeprefix(codecs.BOM_UTF8) if is_first else chunk


def _paragraphs(lines: Iterator[tuple[int, str]], longest: int) -> Values:
    """Paragraphs of a corpus, as texts at the places of their first lines; one of more than `longest`
    characters is several, cut at borders."""
    paragraph = ""
    first, is_whole = 0, True
    for number, line in lines:
        goes_on = not is_whole
        is_whole = line.endswith("\n")
        line = line.rstrip("\r\n") + "\n" * is_whole
        if line.strip() or goes_on:
            first = first if paragraph else number
            paragraph += line
            if len(paragraph) > longest:
                *before, paragraph = cut_text(paragraph, longest)
                for part in filter(str.strip, before):
                    yield f"line {first}", {"text": part}
                first = number
        elif paragraph.strip():
            yield f"line {first}", {"text": paragraph.removesuffix("\n")}
            paragraph = ""
    if paragraph.strip():
        yield f"line {first}", {"text": paragraph.removesuffix("\n")}
