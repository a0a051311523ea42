"""Offloads AdamW's moments between two steps.

They are twice as large as their weights, and needed for an instant of every iteration. FineInfer (3.3) frees
them meanwhile; here they rest in slower memory, and come back bit for bit the same.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from coserve.errors import JobError

KINDS = ("exp_avg", "exp_avg_sq")  # AdamW's moments, each in the shape of its weights
_ALIGNED = 64  # bytes, for vector instructions


class OptimizerOffload(Protocol):
    """A store for the moments of some slabs of weights, zero at first."""

    def bring(self, slab: int, kind: str) -> Tensor:
        """A moment on its weights' device, to be changed in place."""

    def rest(self, slab: int, kind: str, moment: Tensor) -> Tensor:
        """Stores a moment from `bring` with its changes; returns the tensor that now holds it."""

    def settle(self) -> None:
        """Frees the moments' fast memory once all are stored."""


MakeOffload = Callable[[Sequence[Tensor]], OptimizerOffload]  # for flat slabs of weights


def offload_for(device: torch.device, folder: str) -> MakeOffload:
    """Chooses the store: host memory beside a GPU, files in `folder` beside a CPU."""
    return (
        partial(FileOffload, folder=folder) if device.type == "cpu" else partial(HostOffload, device=device)
    )


class FileOffload:
    """One file, mapped into memory. Steps write into the mapping; then the pages are released, and the system
    keeps them or writes them out as it sees fit. The file has no name, so it disappears however the process
    ends.

    Raises JobError if the folder has no room for it.
    """

    def __init__(self, weights: Sequence[Tensor], folder: str) -> None:
        sizes = [-(-slab.nbytes // _ALIGNED) * _ALIGNED for slab in weights]
        total = max(len(KINDS) * sum(sizes), _ALIGNED)
        try:
            with tempfile.TemporaryFile(dir=folder or None, prefix="coserve-moments-") as file:
                # Allocated in advance: with a full disk the first write to a page would kill the process.
                os.posix_fallocate(file.fileno(), 0, total)
                self._map = mmap.mmap(file.fileno(), total)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise JobError(f"the optimizer's state cannot be put into {where}: {error.strerror}") from error
        self._moments: dict[tuple[int, str], Tensor] = {}
        start = 0
        for number, slab in enumerate(weights):
            for kind in KINDS:
                flat = torch.frombuffer(self._map, dtype=slab.dtype, count=len(slab), offset=start)
                self._moments[number, kind] = flat
                start += sizes[number]

    def bring(self, slab: int, kind: str) -> Tensor:
        return self._moments[slab, kind]

    def rest(self, slab: int, kind: str, moment: Tensor) -> Tensor:
        own = self._moments[slab, kind]
        return own if moment.data_ptr() == own.data_ptr() else own.copy_(moment)

    def settle(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # a shared mapping: written data stays in the file


class HostOffload:
    """Host memory, pinned beside a GPU for faster copies."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._moments = {
            (number, kind): torch.zeros(slab.shape, dtype=slab.dtype, pin_memory=pinned)
            for number, slab in enumerate(weights)
            for kind in KINDS
        }

    def bring(self, slab: int, kind: str) -> Tensor:
        return self._moments[slab, kind].to(self._device, non_blocking=True, copy=True)

    def rest(self, slab: int, kind: str, moment: Tensor) -> Tensor:
        return self._moments[slab, kind].copy_(moment, non_blocking=True)

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
