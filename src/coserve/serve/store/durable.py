"""Files and folders that are on disk (fsync) before a row or a message names them.

A file or folder in the making has a name that begins with a dot and gets its own only when it is whole, so
leftovers of a killed server are known by that dot.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_RESUMING: Final = ("training.safetensors", "training.json")  # of a checkpoint: what sampling it needs not


def write_whole(path: Path, pieces: Iterable[bytes]) -> int:
    """Writes a file, in the place of one of that name if there is one; its size in bytes. Raises OSError."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        file.writelines(pieces)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    settle(partial, path)
    return size


def partial_of(path: Path) -> Path:
    """Name of `path` until it is whole."""
    return path.with_name(f".{path.name}")


def settle(partial: Path, path: Path) -> None:
    """Gives a file or folder whose contents are on disk its own name, and waits until that is on disk."""
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def drop_resume_state(checkpoint: Path) -> None:
    """Keeps of a checkpoint only what sampling it needs; one that is damaged or gone is left alone."""
    for name in _RESUMING:
        (checkpoint / name).unlink(missing_ok=True)


def sweep_checkpoints(state: Path) -> None:
    """Removes checkpoints that a killed engine was writing. No engine may be running."""
    for folder in state.glob("jobs/*/checkpoints"):
        sweep(folder)


def sweep(folder: Path) -> None:
    """Removes files and folders in the making that a killed server has left in `folder`."""
    for entry in folder.glob(".*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
