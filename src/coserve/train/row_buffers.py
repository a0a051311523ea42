"""Buffers over all rows of a micro-batch, filled window by window."""

from typing import Generic, TypeVar

from torch import Tensor

from coserve.memory.arena import Lease

K = TypeVar("K", int, str)


class RowBuffers(Generic[K]):
    """Tensors by key, each with `rows` rows along dimension `dim`, allocated from `lease` at the first write
    to a key."""

    def __init__(self, rows: int, lease: Lease, dim: int = 0) -> None:
        self._rows, self._lease, self._dim = rows, lease, dim
        self._buffers: dict[K, Tensor] = {}

    def __contains__(self, key: K) -> bool:
        return self._named(key) in self._buffers

    def write(self, key: K, rows: slice, x: Tensor) -> None:
        """Copies x, the given rows, into the buffer of `key`."""
        if key not in self:
            shape = (*x.shape[: self._dim], self._rows, *x.shape[self._dim + 1 :])
            self._buffers[self._named(key)] = self._lease.take(shape, x.dtype, x.device)
        self.read(key, rows).copy_(x)

    def read(self, key: K, rows: slice) -> Tensor:
        """The given rows of the buffer of `key`, a view."""
        return self._buffers[self._named(key)][(*[slice(None)] * self._dim, self._placed(rows))]

    def _named(self, key: K) -> K:
        """The name of the buffer of `key`."""
        return key

    def _placed(self, rows: slice) -> slice:
        """The place of rows in a buffer."""
        return rows
