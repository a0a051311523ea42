"""Files and folders that are on disk (fsync) before anything refers to them."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on disk. Raises OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, each on disk before the next. Raises OSError."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)
