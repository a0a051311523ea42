"""Memory that is used again instead of given back.

A tape is hundreds of megabytes that live for one micro-batch. Taken from the system each time, every 4 KiB
of it costs a page fault: on the machine this was measured on, the first write to 640 MB took 0.7 s, as long
as a quarter of the micro-batch's forward pass.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Arena:
    """Hands out tensors and takes them back; it never gives anything back to the system."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # flat, smallest first

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor of this shape."""
        count = 1
        for size in shape:
            count *= size
        free = self._free.get((dtype, device), [])
        index = bisect_left(free, count, key=Tensor.numel)
        # A piece over twice as large is left for who needs it.
        fits = index < len(free) and free[index].numel() <= 2 * count
        flat = free.pop(index) if fits else torch.empty(count, dtype=dtype, device=device)
        return flat[:count].view(*shape)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Takes back tensors that `take` gave; nobody may use them any more."""
        for tensor in tensors:
            flat = tensor.new_empty(0).set_(tensor.untyped_storage())
            free = self._free.setdefault((tensor.dtype, tensor.device), [])
            free.insert(bisect_left(free, flat.numel(), key=Tensor.numel), flat)

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be used again."""
        return sum(tensor.nbytes for free in self._free.values() for tensor in free)
