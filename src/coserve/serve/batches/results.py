"""Results of a batch: files that grow by a line for each request, whatever ends the server in between."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.core.disk import sync_path
from coserve.serve.batches.lines import BatchLine
from coserve.serve.store.durable import link_file

_NUMBER: Final = re.compile(rb'\{"id":"batch_req_[A-Za-z0-9]+-(\d{1,9})",')
_PIECE: Final = 1 << 20


class ResultFile:
    """One file of results. A line that is cut off, as of a server that was killed, is dropped when the file
    is opened, and its request asked again: so each request has one line. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b")
        self.done = set[int]()  # numbers of the lines that have results
        end = 0
        self._file.seek(0)
        for text in self._file:
            found = _NUMBER.match(text)
            if found is None or not text.endswith(b"}\n"):
                break
            self.done.add(int(found[1]))
            end += len(text)
        self._file.truncate(end)
        self.size = end

    def add(self, number: int, line: bytes) -> None:
        """Adds the result of a line, which ends with a line break."""
        self._file.write(line)
        self._file.flush()
        self.size += len(line)
        self.done.add(number)

    def settle(self, path: Path) -> None:
        """Has the file at the path where it stays, too. Nothing may be added from now on."""
        os.fsync(self._file.fileno())
        self._file.close()
        path.unlink(missing_ok=True)
        link_file(self.path, path)
        sync_path(path.parent)

    def close(self) -> None:
        self._file.close()


def line_of(
    batch: str, line: BatchLine, response: tuple[int, str, bytes] | None, error: Mapping[str, Any] | None
) -> bytes:
    """A line of results. A `response` has a status, the request's id and a body of JSON."""
    encode = msgspec.json.encode
    id = f"batch_req_{batch.rpartition('_')[2]}-{line.number}"
    told = b"null"
    if response is not None:
        status, request, body = response
        told = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, encode(request), body)
    return b'{"id":%b,"custom_id":%b,"response":%b,"error":%b}\n' % (
        encode(id),
        encode(line.custom_id),
        told,
        encode(error),
    )
