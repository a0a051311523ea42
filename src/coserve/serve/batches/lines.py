"""Lines of a batch's input, read a bounded piece at a time."""

import hashlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from coserve.serve.answering.cost import MOST_BODY_BYTES
from coserve.serve.errors import ApiError

MOST_LINES: Final = 50_000  # of one batch, as OpenAI has it
LONGEST_CUSTOM_ID: Final = 512
_LONGEST_LINE: Final = MOST_BODY_BYTES + 4096  # bytes, with what is around a body
_PIECE: Final = 1 << 20  # bytes that are read at once, but for a long line
_AT_ONCE: Final = 64  # lines


class _LineForm(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch, by the number of its line from 1 on. A bad one has no body, and its `fault`."""

    number: int
    custom_id: str | None = None
    body: bytes = b""
    fault: ApiError | None = None


def count_lines(path: Path) -> int:
    """The number of lines that are not empty, as far as one more than a batch may have."""
    with path.open("rb") as file:
        count = 0
        for _, _ in _lines(file):
            count += 1
            if count > MOST_LINES:
                break
        return count


class BatchReader:
    """Reads the requests to one endpoint, but those with numbers in `done`. For one thread at a time."""

    def __init__(self, path: Path, endpoint: str, done: Container[int]) -> None:
        self._file, self._endpoint, self._done = path.open("rb"), endpoint, done
        self._lines = _lines(self._file)
        self._known = set[bytes]()  # digests of ids

    def take(self) -> list[BatchLine]:
        """The next lines, at least one, or none at the end. The ids of those that are done count as well."""
        found, size = list[BatchLine](), 0
        for number, text in self._lines:
            line = self._read(number, text)
            if number not in self._done:
                found.append(line)
                size += len(line.body)
            if size >= _PIECE or len(found) == _AT_ONCE:
                break
        return found

    def close(self) -> None:
        self._file.close()

    def _read(self, number: int, text: bytes) -> BatchLine:
        if len(text) > _LONGEST_LINE:
            message = f"The line is longer than {_LONGEST_LINE} bytes."
            return BatchLine(number, fault=_bad(message, None, "request_too_large"))
        try:
            form = msgspec.json.decode(text, type=_LineForm)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BatchLine(
                number, fault=_bad(f"The line is no request of a batch: {error}", None, "invalid_json_line")
            )
        id, url = form.custom_id, form.url
        if not 0 < len(id) <= LONGEST_CUSTOM_ID:
            message = f"A custom_id has 1 to {LONGEST_CUSTOM_ID} characters."
            return BatchLine(
                number, id[:LONGEST_CUSTOM_ID], fault=_bad(message, "custom_id", "invalid_value")
            )
        digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._known:
            return BatchLine(
                number,
                id,
                fault=_bad("An earlier line has this custom_id.", "custom_id", "duplicate_custom_id"),
            )
        self._known.add(digest)
        if form.method != "POST":
            return BatchLine(
                number, id, fault=_bad("The method of every line is POST.", "method", "invalid_method")
            )
        if url != self._endpoint:
            message = f"The batch is for {self._endpoint}, which the url of every line has to be."
            return BatchLine(number, id, fault=_bad(message, "url", "mismatched_url"))
        return BatchLine(number, id, bytes(form.body))


def _bad(message: str, param: str | None, code: str) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of lines that are not empty. Of one that is too long only its beginning is kept."""
    number = 0
    while text := file.readline(_LONGEST_LINE + 1):
        number += 1
        rest = text
        while len(rest) > _PIECE and not rest.endswith(b"\n"):
            rest = file.readline(_LONGEST_LINE + 1)
        if text.strip():
            yield number, text.rstrip(b"\r\n") if len(text) <= _LONGEST_LINE else text
