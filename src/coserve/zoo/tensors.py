"""Tensors on disk, each once: a file of safetensors named by the SHA-256 of its tensor's contents.

| file | contents |
|---|---|
| dense | the tensor itself, as `tensor`; mapped into memory it is there once for all processes |
| delta | `delta`, bytes (`compress_delta`), with the parent's name in the metadata; the parent is dense |
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from coserve.errors import ZooError
from coserve.zoo.disk import write_file
from coserve.zoo.folders import KEY, ObjectFolder
from coserve.zoo.weight_file import (
    ITEM_BYTES,
    StoredTensor,
    WeightFileContent,
    header_of,
    open_weight_file,
)

_CHUNK: Final = 8 << 20  # bytes that are grouped together: a multiple of every element's size
_LEVEL: Final = 3  # of zstd
_DENSE: Final = "tensor"
_DELTA: Final = "delta"


def compress_delta(data: memoryview, parent: memoryview, item_bytes: int) -> bytes:
    """Compresses the difference of two tensors of one type and shape, given as bytes."""
    assert data.nbytes == parent.nbytes, "a delta is between tensors of one shape and type"
    packer = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=data.nbytes)
    pieces = []
    for start in range(0, data.nbytes, _CHUNK):
        one, other = _bytes(data[start : start + _CHUNK]), _bytes(parent[start : start + _CHUNK])
        pieces.append(packer.compress(np.bitwise_xor(one, other).reshape(-1, item_bytes).T.tobytes()))
    pieces.append(packer.flush())
    return b"".join(pieces)


def restore_delta(delta: memoryview, parent: memoryview, item_bytes: int) -> memoryview:
    """The bytes of a tensor, given its delta and the parent's bytes. Raises ValueError for a damaged
    delta."""
    out = np.empty(parent.nbytes, np.uint8)
    try:
        for start, piece in _pieces(delta, parent.nbytes):
            grouped = np.frombuffer(piece, np.uint8).reshape(item_bytes, -1).T.reshape(-1)
            np.bitwise_xor(grouped, _bytes(parent[start : start + _CHUNK]), out[start : start + len(piece)])
    except zstandard.ZstdError as error:
        raise ValueError(f"its delta is damaged: {error}") from error
    return memoryview(out.data)


def _pieces(delta: memoryview, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Decompressed chunks with their places; `nbytes` in all."""
    with zstandard.ZstdDecompressor().stream_reader(delta) as reader:
        for start in range(0, nbytes, _CHUNK):
            wanted, piece = min(_CHUNK, nbytes - start), b""
            while len(piece) < wanted and (more := reader.read(wanted - len(piece))):
                piece += more
            if len(piece) < wanted:
                raise ValueError("its delta is too short")
            yield start, piece
        if reader.read(1):
            raise ValueError("its delta is too long")


def _bytes(data: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def tensor_id(tensor: StoredTensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.data)
    return digest.hexdigest()


class TensorStore(ObjectFolder):
    """The folder of all tensors."""

    suffix = ".safetensors"

    def add(self, tensor: StoredTensor, parent: str | None = None) -> str:
        """Stores a tensor unless it is there, and returns its id. Where its difference from the tensor
        `parent` (of which that one's own parent is taken) is smaller than itself, that is stored. The name is
        on disk after `sync`."""
        key = tensor_id(tensor)
        if self.reuse(key):
            return key
        dense = {_DENSE: tensor}
        whole = header_of(dense, {})
        smaller = None if parent is None else self._delta(tensor, self.root_of(parent), len(whole))
        pieces: list[bytes | memoryview] = [whole, tensor.data] if smaller is None else smaller
        write_file(self.place(key), pieces)
        return key

    def read(self, key: str) -> StoredTensor:
        """A tensor; a dense one is in the file, mapped into memory. Raises ZooError."""
        content = self._open(key)
        if _DENSE in content.tensors:
            return content.tensors[_DENSE]
        parent = self._open(self.root_of(key)).tensors.get(_DENSE)
        if parent is None:
            raise ZooError(f"{self.path(key)} is damaged: it is a difference from no dense tensor")
        try:
            data = restore_delta(content.tensors[_DELTA].data, parent.data, ITEM_BYTES[parent.dtype])
        except ValueError as error:
            raise ZooError(f"{self.path(key)} is damaged: {error}") from error
        return StoredTensor(parent.dtype, parent.shape, data)

    def root_of(self, key: str) -> str:
        """The dense tensor that a tensor is stored as a difference from; itself if it is dense. Raises
        ZooError."""
        content = self._open(key)
        if _DENSE in content.tensors:
            return key
        root = content.metadata.get("parent", "")
        if not KEY.fullmatch(root):
            raise ZooError(f"{self.path(key)} is damaged: {root[:80]!r} is no id of a tensor")
        return root

    def checked(self, key: str) -> StoredTensor:
        """A tensor as `read` gives it, compared with its id. Raises ZooError where it is another."""
        tensor = self.read(key)
        if tensor_id(tensor) != key:
            raise ZooError(f"{self.path(key)} is damaged: its contents are not those of its name")
        return tensor

    def _delta(self, tensor: StoredTensor, root: str, header: int) -> list[bytes | memoryview] | None:
        """The file of a tensor's difference from `root`; None where that is not possible, or no smaller than
        the tensor with its `header` of that many bytes."""
        parent = self.read(root)
        if (parent.dtype, parent.shape) != (tensor.dtype, tensor.shape) or not tensor.data.nbytes:
            return None
        packed = compress_delta(tensor.data, parent.data, ITEM_BYTES[tensor.dtype])
        stored = StoredTensor("U8", (len(packed),), memoryview(packed))
        delta_header = header_of({_DELTA: stored}, {"parent": root})
        if len(delta_header) + len(packed) >= header + tensor.data.nbytes:
            return None
        return [delta_header, packed]

    def _open(self, key: str) -> WeightFileContent:
        path = self.path(key)
        if not path.exists():
            raise ZooError(f"the zoo lacks the tensor {key}")
        content = open_weight_file(path)
        if set(content.tensors) not in ({_DENSE}, {_DELTA}):
            raise ZooError(f"{path} is damaged: it has other tensors than it should")
        return content
