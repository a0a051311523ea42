"""Checks whether a database is usable, without changing it, and explains errors."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from coserve.errors import StateError

DAMAGED: Final = (
    "it is damaged: put a copy of it in its place, or move it and its -wal and -shm files away to begin "
    "without the keys, jobs and names that were in it (the folders beside it have the files themselves)"
)
_NO_FILE: Final = "there is something else than a file: move that away"
_NOT_ALLOWED: Final = "give the user that runs the server the right to read and write it and its folder"


def examine(path: Path) -> None:
    """Raises StateError where the database at `path` is unreadable or damaged. A missing or empty one is
    accepted. Reads the whole file: about a second for a gigabyte."""
    try:
        if not path.is_file():
            if path.exists() or path.is_symlink():
                raise cannot_be_used(path, _NO_FILE)
            return
        with path.open("r+b"):
            pass
    except OSError as error:
        raise cannot_be_used(path, f"{error.strerror}: {_NOT_ALLOWED}") from error
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            ((found,),) = connection.execute("PRAGMA quick_check(1)")
    except (sqlite3.Error, ValueError) as error:
        raise explain(path, error) from error
    if found != "ok":
        raise cannot_be_used(path, f"{' '.join(str(found).split())}; {DAMAGED}")


def explain(path: Path | str, error: BaseException | None) -> StateError:
    """StateError for an error of SQLite's, with a remedy."""
    said = str(error)
    if "locked" in said or "busy" in said:
        return cannot_be_used(path, f"{said}: another process holds it, and has to end first")
    if "readonly" in said or "unable to open" in said:
        return cannot_be_used(path, f"{said}: {_NOT_ALLOWED}")
    if "full" in said:
        return cannot_be_used(path, f"{said}: make room")
    return cannot_be_used(path, f"{said}; {DAMAGED}")


def cannot_be_used(path: Path | str, reason: str) -> StateError:
    """Error about the database at `path`, with the reason."""
    return StateError(f"the database {path} cannot be used: {reason}")
