"""Tensors as differences from others: exclusive or, bytes grouped by their place in an element, zstd.

ZipLLM (2505.06252) stores a fine-tuned tensor as the exclusive or with its foundation's, which has zeros
wherever the bits are the same. Sign, exponent and the upper part of the fraction mostly are, so the bytes of
one place in all elements are put together before they are compressed.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

_CHUNK: Final = 8 << 20  # bytes that are grouped together: a multiple of every element's size
_LEVEL: Final = 3  # of zstd


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
