"""Files of safetensors as bytes: the header as it was written, and where each tensor's bytes are."""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from coserve.errors import ZooError
from coserve.zoo.disk import open_file

ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_LENGTH: Final = 8  # bytes in front of the header that tell its length
_ALIGNED: Final = 8  # bytes
LONGEST_HEADER: Final = 32 << 20  # bytes; one of MOST_TENSORS with long names has 25 MB and is read in 0.3 s
MOST_TENSORS: Final = 1 << 17  # of an application; the largest models have 90,000
_Size = Annotated[int, msgspec.Meta(ge=0)]  # fits in 64 bits


class _Field(msgspec.Struct, frozen=True):
    """A tensor in a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]  # dimensions, as torch has them
    data_offsets: tuple[_Size, _Size]


_FIELD: Final = msgspec.json.Decoder(_Field)
_SHOWN: Final = 80  # characters of a name in an error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as bytes: its type as safetensors calls it, and its data in the order of its elements."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class WeightFileContent:
    """A file of safetensors. `header` has the length in front of it; `tensors` are in the order of their
    bytes, which follow each other without gaps."""

    header: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def open_weight_file(path: Path) -> WeightFileContent:
    """Maps a file into memory. Raises ZooError for what is no whole file of safetensors, and for a symbolic
    link."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = file.seek(0, 2)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise ZooError(f"there is no file {path}") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return weights_in(memoryview(mapped))
    except ZooError as error:
        raise ZooError(f"{path} is no whole file of safetensors: {error}") from error


def header_of(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """The header, with its length, of a file that has these tensors in this order."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.data.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text


def parse_header(header: bytes) -> tuple[Mapping[str, str], dict[str, tuple[str, tuple[int, ...], int]]]:
    """The metadata of a header with its length, and the type, shape and bytes of each tensor, in the order of
    the data. Raises ZooError for a header that no whole file has."""
    text = header[_LENGTH : _LENGTH + _header_length(header)]
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"null"), type=dict[str, str] | None) or {}
        if len(raw) > MOST_TENSORS:
            raise ZooError(f"it has {len(raw):,} tensors, and {MOST_TENSORS:,} are possible")
        fields = {name: _FIELD.decode(field) for name, field in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ZooError(f"its header is damaged: {error}") from error
    found, end = {}, 0
    for name, field in sorted(fields.items(), key=lambda item: item[1].data_offsets):
        start, stop = field.data_offsets
        if field.dtype not in ITEM_BYTES:
            raise ZooError(f"{field.dtype[:_SHOWN]!r} is no type of weights")
        if start != end or stop - start != prod(field.shape) * ITEM_BYTES[field.dtype]:
            raise ZooError(f"the bytes of {name[:_SHOWN]!r} do not fit its shape or its place")
        found[name], end = (field.dtype, field.shape, stop - start), stop
    return metadata, found


def weights_in(data: memoryview) -> WeightFileContent:
    """The contents of a file of safetensors in memory. Raises ZooError for what is no whole one."""
    header = bytes(data[: _LENGTH + _header_length(data)])
    metadata, fields = parse_header(header)
    tensors, end = {}, len(header)
    for name, (dtype, shape, nbytes) in fields.items():
        start, end = end, end + nbytes
        tensors[name] = StoredTensor(dtype, shape, data[start:end])
    if end != len(data):
        raise ZooError(f"it has {len(data):,} bytes instead of {end:,}")
    return WeightFileContent(header, metadata, tensors)


def _header_length(data: bytes | memoryview) -> int:
    """Bytes of a header, as the number in front of it has them. Raises ZooError."""
    if len(data) < _LENGTH:
        raise ZooError("it has no header")
    (length,) = struct.unpack_from("<Q", data)
    if length > LONGEST_HEADER or length > len(data) - _LENGTH:
        raise ZooError(f"its header would have {length:,} bytes")
    return int(length)
