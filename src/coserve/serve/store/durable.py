"""Durable files and folders: on disk (fsync) before a row or message refers to them.

An incomplete file or folder has a name with a leading dot, and is renamed when complete, so leftovers of a
killed server are recognised by the dot.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from coserve.core import disk

RESUMING: Final = ("training.safetensors", "training.json")  # files of a checkpoint that only resuming needs


def write_whole(path: Path, pieces: Iterable[bytes]) -> int:
    """Writes or replaces a file; returns its size in bytes. Raises OSError."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        file.writelines(pieces)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    settle(partial, path)
    return size


def partial_of(path: Path) -> Path:
    """Name of `path` until it is complete."""
    return path.with_name(f".{path.name}")


def settle(partial: Path, path: Path) -> None:
    """Renames a complete file or folder to its own name, and fsyncs that."""
    partial.rename(path)
    disk.sync_path(path.parent)


def link_files(source: Path, folder: Path, names: Iterable[str] | None = None) -> None:
    """Makes `folder` with the files of `source`, all or those of these `names`. They are hard links, which
    stay when `source` is deleted and take no room, or copies on a disk without links. So nothing may write to
    these files. Raises OSError, with no folder left."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    disk.make_folder(folder.parent)
    partial.mkdir()
    try:
        for name in sorted(os.listdir(source) if names is None else names):
            link_file(source / name, partial / name)
        disk.sync_path(partial)
        settle(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def link_file(source: Path, target: Path) -> None:
    """Makes a hard link, or a copy on a disk without links. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        disk.sync_path(target)


def sweep_checkpoints(state: Path) -> None:
    """Removes checkpoints that a killed engine was writing. No engine may be running."""
    for folder in state.glob("jobs/*/checkpoints"):
        sweep(folder)


def sweep(folder: Path) -> None:
    """Removes incomplete files and folders that a killed server has left in `folder`."""
    for entry in folder.glob(".*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
