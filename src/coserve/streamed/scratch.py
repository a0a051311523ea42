"""A file for what does not fit into memory: weights that the model's own files do not have in the form in
which they are computed with, and pages of preempted sequences."""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char
from pathlib import Path
from typing import Final

import platformdirs
import torch
from torch import Tensor

from coserve.core.size import show_size
from coserve.errors import ConfigError
from coserve.streamed.files import PAGE, WeightFile
from coserve.streamed.free_ranges import FreeRanges, Range

_MOUNTS: Final = Path("/proc/self/mountinfo")
_IN_MEMORY: Final = ("tmpfs", "ramfs")


class ScratchFile:
    """A file without a name, which disappears however the process ends. Its space is allocated before it is
    written, and used again once it is free. Raises ConfigError where its folder has no room, or is itself in
    memory. `holds` says what for, `most` how many bytes (None: any)."""

    def __init__(
        self, folder: str, holds: str = "weights that are streamed", most: int | None = None
    ) -> None:
        self._folder, self._holds = folder or _default_folder(), holds
        self._ranges = FreeRanges(most)
        self._lock = threading.Lock()  # of the ranges and the size
        if is_in_memory(self._folder):
            raise ConfigError(f"engine.scratch: {self._folder} is in memory, not on a disk")
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix="coserve-scratch-") as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._refusal(error) from error
        self._size = 0  # bytes that the file has
        self.file = WeightFile(None, self._descriptor)

    def write(self, tensors: Sequence[tuple[Tensor, int]], nbytes: int) -> int:
        """Writes tensors at their offsets of `nbytes` in one range, and waits until the disk has them;
        returns where they start."""
        ((start, end),) = self.take(nbytes)
        with self._refusing():
            for tensor, offset in tensors:
                there = tensor if tensor.is_cpu else tensor.cpu()
                _write(self._descriptor, memory_of(there), start + offset)
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        return start

    def take(self, nbytes: int) -> list[Range]:
        """Ranges of `nbytes` together, whole pages, whose space is allocated; one where `most` is None."""
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            ranges = self._ranges.take(nbytes)
        if ranges is None:
            most = show_size(self._ranges.most or 0)
            raise ConfigError(f"engine.scratch: {show_size(nbytes)} are more than is free of {most}")
        try:
            with self._refusing():
                for start, end in ranges:
                    os.posix_fallocate(self._descriptor, start, end - start)
        except ConfigError:
            self.free(ranges)
            raise
        with self._lock:
            self._size = max(self._size, *(end for _, end in ranges))
            self.file.grow(self._size)
        return ranges

    def put(self, start: int, data: memoryview) -> None:
        """Writes data into a range that was taken; the system has the disk write it and drops it from memory
        in its own time."""
        with self._refusing():
            _write(self._descriptor, data, start)
            os.posix_fadvise(self._descriptor, start, len(data), os.POSIX_FADV_DONTNEED)

    def free(self, ranges: Sequence[Range]) -> None:
        """Gives ranges back that `take` returned."""
        with self._lock:
            for one in ranges:
                self._ranges.give(one)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns errors of the system into ConfigError."""
        try:
            yield
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> ConfigError:
        where = f"at {show_size(self._ranges.used)} " if self._ranges.used else ""
        return ConfigError(
            f"engine.scratch: {self._folder} cannot hold {self._holds}: {where}{error.strerror}"
        )


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's memory, packed ones included."""
    nbytes: int = torch.ops.mkldnn._nbytes(tensor) if tensor.is_mkldnn else tensor.nbytes
    return nbytes


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a dense or packed tensor on a CPU, valid while the tensor is."""
    address = torch.ops.mkldnn.data_ptr(tensor) if tensor.is_mkldnn else tensor.data_ptr()
    return memoryview((c_char * nbytes_of(tensor)).from_address(address)).cast("B")


def is_in_memory(folder: str) -> bool:
    """Tells whether a folder is on a file system whose files are in memory."""
    return file_system_of(folder) in _IN_MEMORY


def file_system_of(folder: str) -> str:
    """Kind of the file system that a folder is on, such as ext4; empty where the system does not tell."""
    try:
        device = os.stat(folder).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    own = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].split() for line in lines if line.split()[2] == own)
    return next((kind[0] for kind in kinds if kind), "")


def _default_folder() -> str:
    folder = tempfile.gettempdir()
    return platformdirs.user_cache_dir("coserve", ensure_exists=True) if is_in_memory(folder) else folder


def _write(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + (64 << 20)], start + done)
