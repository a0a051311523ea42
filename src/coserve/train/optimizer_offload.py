"""Offloads AdamW's moments between two steps.

They are twice as large as what they belong to, and needed for an instant of every iteration. FineInfer (3.3)
lets go of them meanwhile; here they lie in slower memory, and come back as the same bits.
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
_ALIGNED = 64  # bytes: what vector instructions like


class OptimizerOffload(Protocol):
    """A place for the moments of some slabs of weights, zero at first."""

    def bring(self, slab: int, kind: str) -> Tensor:
        """A moment where its weights are, to be changed in place."""
        ...

    def rest(self, slab: int, kind: str, moment: Tensor) -> Tensor:
        """Lays a moment that `bring` gave down as it is now; the tensor that it lies in."""
        ...

    def settle(self) -> None:
        """All have been laid down: nothing of them stays in fast memory."""
        ...


MakeOffload = Callable[[Sequence[Tensor]], OptimizerOffload]  # of flat slabs of weights


def offload_for(device: torch.device, folder: str) -> MakeOffload:
    """Chooses the place: host memory beside a GPU, files in `folder` beside a CPU."""
    return (
        partial(FileOffload, folder=folder) if device.type == "cpu" else partial(HostOffload, device=device)
    )


class FileOffload:
    """One file, mapped into memory. Steps write into the mapping; then the pages are given up, and the system
    keeps them or writes them out as it sees fit. The file has no name: nothing is left of it whatever ends
    the process.

    Raises JobError where the folder has no room for it.
    """

    def __init__(self, weights: Sequence[Tensor], folder: str) -> None:
        sizes = [-(-slab.nbytes // _ALIGNED) * _ALIGNED for slab in weights]
        total = max(len(KINDS) * sum(sizes), _ALIGNED)
        try:
            with tempfile.TemporaryFile(dir=folder or None, prefix="coserve-moments-") as file:
                # Room is taken now: a full disk would end the process at the first write to a page.
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
        self._map.madvise(mmap.MADV_DONTNEED)  # a shared mapping: what was written stays in the file


class HostOffload:
    """The host's memory, pinned where a GPU can then copy faster."""

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
            torch.cuda.synchronize(self._device)
