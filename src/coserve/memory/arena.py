"""An arena of tensors that are reused instead of freed.

The activations of a micro-batch are hundreds of megabytes. Allocated anew each time, every 4 KiB of them
costs a page fault: the first write to 640 MB took 0.7 s, a quarter of the micro-batch's forward pass.

Micro-batches differ in their rows, and a tensor that fits one may fit no other. A limit keeps unused tensors
within the bytes reserved for activations.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Arena:
    """Hands out tensors and takes them back. Unused ones are freed only where they and those in use exceed
    `limit` bytes; None keeps all."""

    def __init__(self, limit: int | None = None) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # flat, smallest first
        self._limit = limit
        self._out = 0  # bytes in use

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor of this shape."""
        count = 1
        for size in shape:
            count *= size
        free = self._free.get((dtype, device), [])
        index = bisect_left(free, count, key=Tensor.numel)
        # A piece over twice as large is left for larger tensors.
        if index < len(free) and free[index].numel() <= 2 * count:
            flat = free.pop(index)
        else:
            self._trim(count * dtype.itemsize)
            flat = torch.empty(count, dtype=dtype, device=device)
        self._out += flat.nbytes
        return flat[:count].view(*shape)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Takes back tensors from `take`; the caller must not use them afterwards."""
        for tensor in tensors:
            flat = tensor.new_empty(0).set_(tensor.untyped_storage())
            self._out -= flat.nbytes
            free = self._free.setdefault((tensor.dtype, tensor.device), [])
            free.insert(bisect_left(free, flat.numel(), key=Tensor.numel), flat)
        self._trim()

    def set_limit(self, limit: int | None) -> None:
        """Changes the limit, and frees unused tensors beyond it at once."""
        self._limit = limit
        self._trim()

    def empty(self) -> None:
        """Frees all unused tensors."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of unused tensors."""
        return sum(tensor.nbytes for free in self._free.values() for tensor in free)

    def _trim(self, more: int = 0) -> None:
        """Frees unused tensors, largest first, until `more` bytes fit under the limit."""
        if self._limit is None:
            return
        excess = self._out + self.nbytes + more - self._limit
        while excess > 0 and (lists := [free for free in self._free.values() if free]):
            largest = max(lists, key=lambda free: free[-1].nbytes)
            excess -= largest.pop().nbytes


class Lease:
    """Tensors that one holder has taken from an arena, to be given back in part or all at once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: dict[int, Tensor] = {}  # by id

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `Arena.take`."""
        tensor = self._arena.take(shape, dtype, device)
        self._held[id(tensor)] = tensor
        return tensor

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Gives back tensors that `take` gave."""
        self._arena.give_back([self._held.pop(id(tensor)) for tensor in tensors])

    def release(self) -> None:
        """Gives back all that is held."""
        self.give_back([*self._held.values()])

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(tensor.nbytes for tensor in self._held.values())
