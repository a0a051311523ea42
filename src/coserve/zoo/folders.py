"""Folders of files that are named by the SHA-256 of their contents."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

from coserve.errors import ZooError
from coserve.zoo.disk import (
    check_no_link,
    folder_entries,
    make_folder,
    read_file,
    sync_folder,
    write_file,
)

KEY: Final = re.compile(r"[0-9a-f]{64}")  # a SHA-256


class ObjectFolder:
    """Files `ab/ab12….suffix`. What is stored is on disk by name after `sync`."""

    suffix: ClassVar[str] = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unsynced: set[Path] = set()

    def path(self, key: str) -> Path:
        """The file of a key. Raises ZooError where it or its folder is a symbolic link."""
        path = self._folder / key[:2] / f"{key}{self.suffix}"
        check_no_link(path.parent)
        check_no_link(path)
        return path

    def place(self, key: str) -> Path:
        """The file of a key that is about to be written, in a folder that is there. Raises ZooError."""
        path = self.path(key)
        make_folder(path.parent)
        self._unsynced.add(path.parent)
        return path

    def reuse(self, key: str) -> bool:
        """Tells whether a key is there. Its name may be younger than the last sync of a process that was
        killed, so it is synced again. Raises ZooError."""
        path = self.path(key)
        if not path.is_file():
            return False
        self._unsynced.add(path.parent)
        return True

    def sync(self) -> None:
        """Waits until the names of all files are on disk."""
        for folder in sorted(self._unsynced):
            sync_folder(folder)
        self._unsynced.clear()

    def nbytes(self, key: str) -> int:
        """Bytes of a file. Raises ZooError where it is missing."""
        try:
            return self.path(key).stat().st_size
        except OSError as error:
            raise ZooError(f"the zoo lacks {self.path(key)}") from error

    def all_files(self) -> Iterator[tuple[str, Path]]:
        """All complete files with their keys."""
        for file in self._entries():
            if not file.name.startswith("."):
                yield file.name.removesuffix(self.suffix), file

    def all_keys(self) -> Iterator[str]:
        """Keys of all complete files."""
        return (key for key, _ in self.all_files())

    def leftovers(self) -> Iterator[Path]:
        """Files that a killed process did not complete."""
        return (file for file in self._entries() if file.name.startswith("."))

    def links(self) -> Iterator[Path]:
        """Symbolic links in the place of files and of their folders."""
        for folder in folder_entries(self._folder):
            inner = [folder] if folder.is_symlink() else folder_entries(self._folder, folder.name)
            yield from (Path(entry.path) for entry in inner if entry.is_symlink())

    def _entries(self) -> Iterator[Path]:
        """All regular files of folders that are none of a link."""
        for folder in folder_entries(self._folder):
            for entry in folder_entries(self._folder, folder.name) if len(folder.name) == 2 else ():
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


class FileObjects(ObjectFolder):
    """Small files as they are: configurations, tokenizers, headers of weights."""

    def add(self, data: bytes) -> str:
        """Stores a file unless it is there, and returns its SHA-256."""
        key = hashlib.sha256(data).hexdigest()
        if not self.reuse(key):
            write_file(self.place(key), [data])
        return key

    def read(self, key: str) -> bytes:
        """A file's contents. Raises ZooError where it is missing or damaged."""
        data = read_file(self.path(key))
        if hashlib.sha256(data).hexdigest() != key:
            raise ZooError(f"{self.path(key)} is damaged: its contents are not those of its name")
        return data
