"""Files that are on disk, whole and for good, before anything refers to them.

A file is written under a name with a leading dot and renamed when it is complete. Whatever kills the process
in between leaves a file with a dot, which nobody reads and `gc` removes.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from coserve.errors import ZooError

_PIECE: Final = 16 << 20  # bytes of one write
Pieces = Iterable[bytes | memoryview]


def write_file(path: Path, pieces: Pieces) -> int:
    """Writes or replaces a file; returns its size in bytes. The file's name is on disk once its folder is
    synced. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    size = 0
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left.nbytes:
                written = os.write(handle, left[:_PIECE])
                left, size = left[written:], size + written
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, path)
    return size


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, each on disk before the next. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    sync_folder(folder.parent)


def remove_file(path: Path) -> None:
    """Removes a file if it is there. Raises OSError."""
    if os.path.lexists(path):
        os.unlink(path)


def read_file(path: Path) -> bytes:
    """The contents of one of the zoo's files. Raises ZooError where it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ZooError(f"the zoo lacks {path}") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from error
