"""Artifacts of one server alone: they are in its state folder, and nowhere else."""

import asyncio
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ArtifactStore(Protocol):
    """Files and folders that rows of the database name, by their paths in the state folder.

    A method that adds a row puts its artifact first, so a row's artifact can be brought to any server. What
    has been put never changes, but for files that `trim` takes from it.
    """

    async def put(self, path: Path, replace: bool = False) -> None:
        """Returns once what is at `path` is where all servers find it. Where another server has put other
        contents by that name these win, and are at `path` afterwards, unless `replace`. Raises StateError
        where the store cannot be used now; a later call may succeed."""

    async def get(self, path: Path) -> Path:
        """Brings an artifact to `path`, where it is not there yet, and returns that. An artifact that was
        deleted is missing afterwards. Raises StateError."""

    def is_here(self, path: Path) -> bool:
        """Tells whether `get` has nothing to bring."""

    async def discard(self, path: Path) -> None:
        """Deletes an artifact everywhere, or all below a folder. It has no row any more."""

    async def trim(self, path: Path, names: Collection[str]) -> None:
        """Deletes some files of a folder, everywhere."""


class LocalArtifacts:
    """The plain implementation: nothing has to be moved."""

    async def put(self, path: Path, replace: bool = False) -> None:
        """Nothing: the files are where they stay."""

    async def get(self, path: Path) -> Path:
        """The path."""
        return path

    def is_here(self, path: Path) -> bool:
        """True: what is not here is nowhere."""
        return True

    async def discard(self, path: Path) -> None:
        """Deletes a file or a folder."""
        await asyncio.to_thread(remove, path)

    async def trim(self, path: Path, names: Collection[str]) -> None:
        """Deletes some files of a folder; damaged or missing ones are ignored."""
        await asyncio.to_thread(remove_parts, path, names)


def remove(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_parts(folder: Path, names: Collection[str]) -> bool:
    """Deletes some files of a folder; tells whether any was there."""
    found = False
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / name).unlink()
            found = True
    return found
