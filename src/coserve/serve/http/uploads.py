"""Uploads: a form with one file, streamed from the network to disk."""

import asyncio
import os
from pathlib import Path
from typing import Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MAX_BOUNDARY_LENGTH, MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from coserve.serve.errors import ApiError

_PIECE: Final = 2**20  # bytes that are written at once
_MOST_TEXT: Final = 64 * 1024  # bytes of all fields that are not the file
_MOST_PARTS: Final = 16


class Upload:
    """An upload: text `fields`, and one file in the field of the name `file`, which goes to `path`.

    Raises ApiError 400 for any other body, and 413 for a file of more than `most` bytes. The caller removes
    `path` after errors.
    """

    def __init__(self, path: Path, most: int, file: str = "file") -> None:
        self._file_field = file
        self.path, self.fields = path, dict[str, str]()
        self.filename: str | None = None
        self.bytes = 0
        self._most = most
        self._parts = self._texts = 0
        self._name, self._value = b"", b""  # of the header that is being read
        self._disposition = b""
        self._field = ""
        self._is_file = self._is_whole = False
        self._text = bytearray()
        self._pieces = bytearray()

    async def receive(self, request: Request) -> None:
        """Reads the body to its end; the file is then on disk (fsync)."""
        parser = MultipartParser(_boundary(request), {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        })  # fmt: skip
        with self.path.open("xb") as file:
            try:
                async for chunk in request.stream():
                    parser.write(chunk)
                    if len(self._pieces) >= _PIECE:
                        await asyncio.to_thread(file.write, self._take())
                parser.finalize()
            except FormParserError as error:
                raise ApiError(400, f"The form cannot be read: {error}") from error
            except ClientDisconnect as error:
                raise ApiError(400, "The upload ended early.") from error
            if not self._is_whole:
                raise ApiError(400, "The form cannot be read: it stops before its end.")
            file.write(self._take())
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        if self.filename is None:
            name = self._file_field
            raise ApiError(400, f"Missing required parameter: '{name}'.", param=name)

    def _take(self) -> bytes:
        taken = bytes(self._pieces)
        self._pieces.clear()
        return taken

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise ApiError(400, f"The form has more than {_MOST_PARTS} parts.")
        self._disposition, self._is_file = b"", False
        self._text.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = _text_of(options.get(b"name", b""))
        self._is_file = self._field == self._file_field
        if not self._is_file:
            return
        if self.filename is not None:
            raise ApiError(400, "The form has more than one file.", param="file")
        self.filename = _text_of(options.get(b"filename", b"")) or "file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.bytes += end - start
            if self.bytes > self._most:
                message = f"The file is larger than {self._most} bytes."
                raise ApiError(413, message, param="file", code="file_too_large")
            self._pieces += data[start:end]
            return
        self._texts += end - start
        if self._texts > _MOST_TEXT:
            raise ApiError(400, f"The fields beside the file are larger than {_MOST_TEXT} bytes.")
        self._text += data[start:end]

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._field] = _text_of(bytes(self._text))

    def _all(self) -> None:
        self._is_whole = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, "The body must be multipart/form-data with the fields 'file' and 'purpose'.")
    if len(boundary) > MAX_BOUNDARY_LENGTH:
        raise ApiError(400, f"The form's boundary is longer than {MAX_BOUNDARY_LENGTH} bytes.")
    return boundary


def _text_of(value: bytes) -> str:
    return value.decode("utf-8", "replace")
