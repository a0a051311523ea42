"""A file for weights that the model's own files do not have in the form in which they are computed with."""

import os
import tempfile
from collections.abc import Sequence
from ctypes import c_char
from pathlib import Path
from typing import Final

import platformdirs
import torch
from torch import Tensor

from coserve.core.size import show_size
from coserve.errors import ConfigError
from coserve.streamed.files import PAGE, WeightFile

_MOUNTS: Final = Path("/proc/self/mountinfo")
_IN_MEMORY: Final = ("tmpfs", "ramfs")


class ScratchFile:
    """A file without a name, which disappears however the process ends. Its space is allocated before it is
    written. Raises ConfigError where its folder has no room, or is itself in memory."""

    def __init__(self, folder: str) -> None:
        self._folder = folder or _default_folder()
        if is_in_memory(self._folder):
            raise ConfigError(f"engine.scratch: {self._folder} is in memory, not on a disk")
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix="coserve-weights-") as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._refusal(error) from error
        self._end = 0
        self.file = WeightFile(None, self._descriptor)

    def write(self, tensors: Sequence[tuple[Tensor, int]], nbytes: int) -> int:
        """Writes tensors at their offsets of `nbytes` at the file's end; returns where these start."""
        start, self._end = self._end, self._end + -(-nbytes // PAGE) * PAGE
        try:
            os.posix_fallocate(self._descriptor, start, self._end - start)
            for tensor, offset in tensors:
                _write(self._descriptor, memory_of(tensor), start + offset)
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, start, self._end - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._refusal(error, nbytes) from error
        self.file.grow(self._end)
        return start

    def _refusal(self, error: OSError, nbytes: int = 0) -> ConfigError:
        where = f"at {show_size(self._end)} of weights " if nbytes else ""
        return ConfigError(
            f"engine.scratch: {self._folder} cannot hold weights that are streamed: {where}{error.strerror}"
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
