"""Files of safetensors as bytes: the header as it was written, and where each tensor's bytes are."""

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from coserve.errors import ZooError

ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_LENGTH: Final = 8  # bytes in front of the header that tell its length
_LONGEST_HEADER: Final = 100 << 20  # bytes, as safetensors has it
_ALIGNED: Final = 8  # bytes


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
    """Maps a file into memory. Raises ZooError for what is no whole file of safetensors."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise ZooError(f"there is no file {path}") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return weights_in(memoryview(mapped))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
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
    the data. Raises ValueError and what malformed JSON does."""
    (length,) = struct.unpack_from("<Q", header)
    if length > _LONGEST_HEADER or len(header) < _LENGTH + length:
        raise ValueError("its header is too long")
    fields = json.loads(header[_LENGTH : _LENGTH + length])
    metadata = fields.pop("__metadata__", None) or {}
    found, end = {}, 0
    for name, field in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), shape = field["data_offsets"], tuple(map(int, field["shape"]))
        if field["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{field['dtype']} is no type of weights")
        if (
            start != end
            or stop - start != prod(shape) * ITEM_BYTES[field["dtype"]]
            or min(shape, default=0) < 0
        ):
            raise ValueError(f"the bytes of {name!r} do not fit its shape or its place")
        found[name], end = (field["dtype"], shape, stop - start), stop
    return metadata, found


def weights_in(data: memoryview) -> WeightFileContent:
    """The contents of a file of safetensors in memory. Raises ValueError, and what malformed JSON does."""
    (length,) = struct.unpack_from("<Q", data)
    if length > _LONGEST_HEADER or length > len(data) - _LENGTH:
        raise ValueError("its header is too long")
    header = bytes(data[: _LENGTH + length])
    metadata, fields = parse_header(header)
    tensors, end = {}, len(header)
    for name, (dtype, shape, nbytes) in fields.items():
        start, end = end, end + nbytes
        tensors[name] = StoredTensor(dtype, shape, data[start:end])
    if end != len(data):
        raise ValueError(f"it has {len(data):,} bytes instead of {end:,}")
    return WeightFileContent(header, metadata, tensors)
