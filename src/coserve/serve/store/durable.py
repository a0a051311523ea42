"""Durable files and folders: on disk (fsync) before a row or message refers to them.

An incomplete file or folder has a name with a leading dot, and is renamed when complete, so leftovers of a
killed server are recognised by the dot.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_RESUMING: Final = ("training.safetensors", "training.json")  # of a checkpoint: what sampling it needs not


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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def drop_resume_state(checkpoint: Path) -> None:
    """Removes the parts of a checkpoint that sampling does not need; damaged or missing ones are ignored."""
    for name in _RESUMING:
        (checkpoint / name).unlink(missing_ok=True)


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
