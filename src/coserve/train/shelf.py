"""Where AdamW's moments rest between two steps, if not beside the weights.

They are twice as large as what they belong to, and needed for an instant of every iteration. FineInfer (3.3)
lets go of them meanwhile; here they lie in slower memory, and come back as the same bits.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from coserve.errors import JobError

KINDS = ("exp_avg", "exp_avg_sq")  # AdamW's moments, each in the shape of its weights
_ALIGNED = 64  # bytes: what vector instructions like


class Shelf(Protocol):
    """A place for the moments of some weights, zero at first."""

    def bring(self, name: str, kind: str) -> Tensor:
        """A moment where its weights are, to be changed in place."""
        ...

    def rest(self, name: str, kind: str, moment: Tensor) -> Tensor:
        """Lays a moment that `bring` gave down as it is now; the tensor that it lies in."""
        ...

    def settle(self) -> None:
        """All have been laid down: nothing of them stays in fast memory."""
        ...


MakeShelf = Callable[[Mapping[str, Tensor]], Shelf]


def shelf_for(device: torch.device, folder: str) -> MakeShelf:
    """Beside a GPU, the host's memory; beside a processor, files in `folder`."""
    return partial(FileShelf, folder=folder) if device.type == "cpu" else partial(HostShelf, device=device)


class FileShelf:
    """One file, mapped into memory. Steps write into the mapping; then the pages are given up, and the system
    keeps them or writes them out as it sees fit. The file has no name: nothing is left of it whatever ends
    the process.

    Raises JobError where the folder has no room for it.
    """

    def __init__(self, weights: Mapping[str, Tensor], folder: str) -> None:
        sizes = {name: -(-weight.nbytes // _ALIGNED) * _ALIGNED for name, weight in weights.items()}
        total = max(len(KINDS) * sum(sizes.values()), _ALIGNED)
        try:
            with tempfile.TemporaryFile(dir=folder or None, prefix="coserve-moments-") as file:
                # Room is taken now: a full disk would end the process at the first write to a page.
                os.posix_fallocate(file.fileno(), 0, total)
                self._map = mmap.mmap(file.fileno(), total)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise JobError(f"the optimizer's state cannot be put into {where}: {error.strerror}") from error
        self._moments: dict[tuple[str, str], Tensor] = {}
        start = 0
        for name, weight in weights.items():
            for kind in KINDS:
                flat = torch.frombuffer(self._map, dtype=weight.dtype, count=weight.numel(), offset=start)
                self._moments[name, kind] = flat.view(weight.shape)
                start += sizes[name]

    def bring(self, name: str, kind: str) -> Tensor:
        return self._moments[name, kind]

    def rest(self, name: str, kind: str, moment: Tensor) -> Tensor:
        own = self._moments[name, kind]
        return own if moment.data_ptr() == own.data_ptr() else own.copy_(moment)

    def settle(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # a shared mapping: what was written stays in the file


class HostShelf:
    """The host's memory, pinned where a GPU can then copy faster."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._moments = {
            (name, kind): torch.zeros(weight.shape, dtype=weight.dtype, pin_memory=pinned)
            for name, weight in weights.items()
            for kind in KINDS
        }

    def bring(self, name: str, kind: str) -> Tensor:
        return self._moments[name, kind].to(self._device, non_blocking=True, copy=True)

    def rest(self, name: str, kind: str, moment: Tensor) -> Tensor:
        return self._moments[name, kind].copy_(moment, non_blocking=True)

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
