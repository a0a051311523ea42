"""A snapshot of tensors that are about to change, copied while work goes on (copy on write)."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_PIECE: Final = 1 << 22  # elements copied under the lock at a time: 16 MiB in float32, some 10 ms


class TensorSnapshot:
    """Copies of flat tensors as they were when it was made, although their owner goes on to change them.

    `copies` makes them piece by piece, on any thread. The owner calls it before its first change: it copies
    what the other thread has not reached, which is nothing where a pass of training lies between. To make a
    snapshot copies no byte.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copies = [torch.empty(0)] * len(tensors)
        starts = ((number, start) for number, t in enumerate(tensors) for start in range(0, len(t), _PIECE))
        self._left = deque(starts)
        self._lock = threading.Lock()  # held for one piece

    def copies(self) -> list[Tensor]:
        """Copies what is not copied yet, and returns the copies, on the CPU, in the tensors' order."""
        while self._copy_piece():
            pass
        return self._copies

    def _copy_piece(self) -> bool:
        """Copies a piece; False where all are copied."""
        with self._lock:
            if not self._left:
                self._tensors = []  # free for the owner to drop
                return False
            number, start = self._left[0]
            tensor = self._tensors[number]
            if start == 0:
                self._copies[number] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[number][start : start + _PIECE].copy_(tensor[start : start + _PIECE])
            self._left.popleft()
            return True
