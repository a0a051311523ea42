"""Files that are on disk, whole and for good, before anything refers to them.

A file is written under a name with a leading dot and renamed when it is complete. Whatever kills the process
in between leaves a file with a dot, which nobody reads and `gc` removes.

A zoo may come from anywhere, and so may a folder that is added. A symbolic link in them could lead to any
file of this machine, so none is followed, and whatever is no regular file is not opened.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from coserve.errors import ZooError

MOST_BYTES: Final = 256 << 20  # of a file that is read as a whole
_PIECE: Final = 16 << 20  # bytes of one write
Pieces = Iterable[bytes | memoryview]


def write_file(path: Path, pieces: Pieces) -> int:
    """Writes or replaces a file; returns its size in bytes. The file's name is on disk once its folder is
    synced. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    remove_file(partial)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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


def remove_folder(folder: Path) -> None:
    """Removes a folder and what is in it, or whatever else has its name, if it is there; of a link the link
    alone. Raises OSError."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        shutil.rmtree(folder)
    else:
        remove_file(folder)


def folder_entries(folder: Path, name: str = "") -> Iterator[os.DirEntry[str]]:
    """Entries of a folder in order, or of its subfolder `name`; none where it is missing, or a link."""
    path = folder / name
    if path.is_symlink() or not path.is_dir():
        return
    with os.scandir(path) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)


def check_no_link(path: Path) -> None:
    """Raises ZooError for a symbolic link."""
    if path.is_symlink():
        raise ZooError(f"{path} is a symbolic link, and none is followed: put what it leads to in its place")


def open_file(path: Path) -> int:
    """Opens a file for reading. Raises ZooError for a symbolic link and for what is no file, OSError for one
    that is missing or cannot be read."""
    check_no_link(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ZooError(f"{path} is no file")
    return handle


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """The contents of one of the zoo's files, of at most so many bytes. Raises ZooError where it is missing,
    larger, a symbolic link, or cannot be read."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ZooError(f"{path} is larger than {most:,} bytes")
            return file.read()
    except FileNotFoundError as error:
        raise ZooError(f"the zoo lacks {path}") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read: {error.strerror}") from error
