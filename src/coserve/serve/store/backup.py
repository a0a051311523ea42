"""Backups of a state folder whose server may run, and their way back.

Files are pinned first, by hard links in the state folder; then the database is copied by SQLite's own backup;
then what is new is pinned. A file whose row is in the copy was on disk before its row, so it is pinned unless
it was deleted between the two looks: then the database is copied again. A backup appears under its name once
it is whole and on disk, and so does a restored folder.
"""

import fcntl
import hashlib
import io
import lzma
import os
import shutil
import sqlite3
import tarfile
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final
from urllib.parse import quote

import msgspec

from coserve.core.disk import sync_path
from coserve.errors import StateError
from coserve.serve.store.durable import settle
from coserve.serve.store.examine import examine
from coserve.serve.store.migrate import head_revision, known_revisions

DATABASE: Final = "coserve.db"
MANIFEST: Final = "manifest.json"
_FOLDERS: Final = ("files", "jobs", "adapters", "batches", "uploads", "tinker", "usage")
_STAGE: Final = ".backup"  # in the state folder: links take no room there
_TRIES: Final = 10
_PIECE: Final = 2**20
_WHOLE: Final = 2**30
# The entries of folders that rows name, by folder; `usage` and what is in these entries has no rows.
_ENTRIES: Final = {
    "files": "SELECT id || suffix FROM files",
    "jobs": "SELECT id FROM jobs",
    "batches": "SELECT id FROM batches",
    "uploads": "SELECT id FROM uploads",
}
_PATHS: Final = (
    "adapters",
    "checkpoints",
    "tinker_checkpoints",
    "tinker_states",
)  # tables whose rows have a `path`


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a backup: the shape of its database, its time, and each file's size and SHA-256. With
    `shared_artifacts` some files of its rows are where several servers have them."""

    revision: str
    created: int
    files: dict[str, tuple[int, str]]
    shared_artifacts: bool = False


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """A backup that was made or restored."""

    path: str
    files: int
    bytes: int
    revision: str
    shared_artifacts: bool = False


def back_up(state: Path, target: Path, shared_artifacts: bool = False) -> BackupSummary:
    """Writes a backup of a state folder, as a folder, or as one file where the name ends in .tar, .tar.gz or
    .tgz. With `shared_artifacts` the folder has copies of some artifacts alone. Raises StateError where the
    target is there already, or the state cannot be read as a whole."""
    if not (state / DATABASE).is_file():
        raise StateError(f"{state} is no state folder: it has no {DATABASE}")
    if target.exists():
        raise StateError(f"{target} is there already: choose another name for the backup")
    if target.resolve().is_relative_to(state.resolve()):
        raise StateError(f"{target} is in the state folder: choose a place elsewhere")
    partial = _partial_of(target)
    try:
        with _lock(state):
            stage = state / _STAGE
            shutil.rmtree(stage, ignore_errors=True)  # of a backup that was killed
            _remove(partial)
            try:
                _pin(state, stage, shared_artifacts)
                summary = _write(stage, partial, target, shared_artifacts)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
            settle(partial, target)
    except OSError as error:
        _remove(partial)
        raise StateError(f"the backup {target} cannot be written: {error}") from error
    return summary


def restore(source: Path, state: Path) -> BackupSummary:
    """Makes a state folder of a backup, whose bytes are all checked. Raises StateError where the folder has
    something in it already, or the backup is damaged or of a newer coserve; then nothing is changed."""
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        raise StateError(f"{state} is not empty: restore into a folder that is missing or empty")
    partial = _partial_of(state)
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir(mode=0o700)
        try:
            manifest, sizes = _read_whole(source, partial)
            if manifest.revision not in known_revisions():
                raise StateError(
                    f"{source} was written by a newer coserve (its shape is {manifest.revision}, this "
                    f"version knows {head_revision()}): update coserve"
                )
            examine(partial / DATABASE)
            if not manifest.shared_artifacts and (missing := _missing(partial)):
                raise StateError(f"{source} is damaged: it lacks {missing[0]}")
            _sync_tree(partial)
            settle(partial, state)
        except BaseException:
            _remove(partial)
            raise
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, sqlite3.Error, ValueError) as error:
        raise StateError(f"{source} is no whole backup: {error}") from error
    except OSError as error:
        raise StateError(f"{source} cannot be restored to {state}: {error}") from error
    return BackupSummary(str(state), len(manifest.files), sizes, manifest.revision, manifest.shared_artifacts)


def sweep_stage(state: Path) -> None:
    """Removes the links that a killed backup has left: files that tenants delete would stay, and their room
    be taken. Those of a backup that is under way stay."""
    if (stage := state / _STAGE).exists():
        with suppress(StateError, OSError), _lock(state):
            shutil.rmtree(stage, ignore_errors=True)


def _partial_of(path: Path) -> Path:
    """The name of a backup or a state folder until it is complete: one that nothing else has, as what a
    killed command left there is removed (`.config` would be somebody's own)."""
    return path.with_name(f".{path.name}.coserve-partial")


@contextmanager
def _lock(state: Path) -> Iterator[None]:
    descriptor = os.open(state / "backup.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"another backup of {state} is under way: wait for its end") from error
        yield
    finally:
        os.close(descriptor)


def _pin(state: Path, stage: Path, shared_artifacts: bool) -> None:
    """Fills `stage` with a copy of the database and links to all files that it names."""
    stage.mkdir(mode=0o700)
    for _ in range(_TRIES):
        _link_new(state, stage)
        (stage / DATABASE).unlink(missing_ok=True)
        _copy_database(state / DATABASE, stage / DATABASE)
        _link_new(state, stage)
        if shared_artifacts or not (missing := _missing(stage)):
            break
    else:
        raise StateError(
            f"{state} has rows whose files are gone, such as {missing[0]}: it is damaged, unless the server "
            "has them in a store: then give --artifacts here, too"
        )
    _drop_unnamed(stage)


def _link_new(state: Path, stage: Path) -> None:
    """Links what `stage` does not have. Names with a dot are of what is being written."""
    for folder in _FOLDERS:
        for where, folders, files in os.walk(state / folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            into = stage / Path(where).relative_to(state)
            into.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in files:
                if not name.startswith(".") and not (into / name).exists():
                    _link(Path(where, name), into / name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:  # deleted meanwhile
        return
    except OSError:  # a disk without links
        try:
            shutil.copyfile(source, target, follow_symlinks=False)
        except FileNotFoundError:
            target.unlink(missing_ok=True)


def _copy_database(source: Path, target: Path) -> None:
    uri = f"file:{quote(str(source.absolute()))}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)  # of one snapshot: writers do not wait, and it does not begin again
            new.execute("PRAGMA journal_mode=DELETE")  # one file, without -wal and -shm beside it
    except sqlite3.Error as error:
        raise StateError(f"the database {source} cannot be copied: {error}") from error


def _named(folder: Path) -> dict[str, set[str]]:
    """The names that rows of a folder's database have, as entries of each of its folders."""
    found: dict[str, set[str]] = {name: set() for name in _FOLDERS}
    with closing(sqlite3.connect(f"file:{quote(str(folder / DATABASE))}?mode=ro", uri=True)) as database:
        for entries, query in _ENTRIES.items():
            found[entries] |= {entry for (entry,) in database.execute(query)}
        for table in _PATHS:
            for (path,) in database.execute(f"SELECT path FROM {table}"):
                if not os.path.isabs(path):
                    first, _, rest = path.partition("/")
                    found.setdefault(first, set()).add(rest if first != "jobs" else rest.partition("/")[0])
    return found


def _missing(folder: Path) -> list[str]:
    """Paths of files and adapters that rows name and `folder` does not have. Jobs, batches and uploads may
    have none."""
    with closing(sqlite3.connect(f"file:{quote(str(folder / DATABASE))}?mode=ro", uri=True)) as database:
        wanted = [f"files/{entry}" for (entry,) in database.execute(_ENTRIES["files"])]
        for table in _PATHS:
            wanted += [path for (path,) in database.execute(f"SELECT path FROM {table}")]
    return [path for path in wanted if not os.path.isabs(path) and not (folder / path).exists()]


def _drop_unnamed(stage: Path) -> None:
    """Removes entries without a row: those that were deleted before the copy of the database, or whose rows
    came after it."""
    named = _named(stage)
    for folder in _FOLDERS[:-1]:  # the journal of usage has no rows
        for entry in (stage / folder).iterdir() if (stage / folder).exists() else ():
            if entry.name not in named[folder]:
                _remove(entry)


def _write(stage: Path, partial: Path, target: Path, shared_artifacts: bool) -> BackupSummary:
    """Copies the stage to where it becomes the backup, with a manifest, durably."""
    with closing(sqlite3.connect(stage / DATABASE)) as database:
        ((revision,),) = database.execute("SELECT version_num FROM alembic_version")
    files: dict[str, tuple[int, str]] = {}
    is_tar, is_packed = target.name.endswith((".tar", ".tar.gz", ".tgz")), target.name.endswith("gz")
    paths = sorted(path for path in stage.rglob("*") if path.is_file() and not path.is_symlink())
    if is_tar:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz" if is_packed else "w") as tar:
                for path in paths:
                    files[path.relative_to(stage).as_posix()] = _add(tar, path, stage)
                manifest = Manifest(revision, int(time.time()), files, shared_artifacts)
                (stage / MANIFEST).write_bytes(msgspec.json.encode(manifest))
                _add(tar, stage / MANIFEST, stage)
            file.flush()
            os.fsync(file.fileno())
    else:
        partial.mkdir(mode=0o700, parents=True)
        for path in paths:
            name = path.relative_to(stage).as_posix()
            (partial / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("rb") as source:
                files[name] = _save(source, partial / name)
        manifest = Manifest(revision, int(time.time()), files, shared_artifacts)
        _save(io.BytesIO(msgspec.json.encode(manifest)), partial / MANIFEST)
        _sync_tree(partial)
    return BackupSummary(
        str(target), len(files), sum(size for size, _ in files.values()), revision, shared_artifacts
    )


class _Hashing:
    """A file that is read as far as it was long at first, and hashed: journals and results may grow."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left, self.digest = file, size, hashlib.sha256()

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(self._left if count < 0 else min(count, self._left))
        self._left -= len(data)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, path: Path, stage: Path) -> tuple[int, str]:
    info = tar.gettarinfo(path, path.relative_to(stage).as_posix())
    info.type, info.linkname = tarfile.REGTYPE, ""  # two names of one file are two files
    info.uid = info.gid = 0
    info.uname, info.gname, info.mode = "", "", 0o600
    info.size = path.stat().st_size
    with path.open("rb") as file:
        hashing = _Hashing(file, info.size)
        tar.addfile(info, hashing)
    return info.size, hashing.digest.hexdigest()


def _save(source: IO[bytes], target: Path) -> tuple[int, str]:
    """Copies bytes to a new file, and returns their number and digest."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _read_whole(source: Path, folder: Path) -> tuple[Manifest, int]:
    """Copies a backup's files to a folder and compares them with its manifest. Raises StateError."""
    found: dict[str, tuple[int, str]] = {}
    manifest = b""
    for name, file in _members(source):
        if name == MANIFEST:
            manifest = file.read(_WHOLE)
            continue
        parts = PurePosixPath(name).parts
        if not {*parts[:1]} & {DATABASE, *_FOLDERS} or ".." in parts or name in found:
            raise StateError(f"{source} is no backup: it has {name!r}")
        (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found[name] = _save(file, folder / name)
    try:
        told = msgspec.json.decode(manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise StateError(f"{source} is no whole backup: it has no {MANIFEST} that can be read") from error
    if wrong := {*told.files.items()} ^ {*found.items()}:
        raise StateError(f"{source} is damaged: {min(wrong)[0]} is not as its manifest says")
    if DATABASE not in found:
        raise StateError(f"{source} is no backup: it has no {DATABASE}")
    return told, sum(size for size, _ in found.values())


def _members(source: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a backup, as a folder or as one file."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    yield path.relative_to(source).as_posix(), file
        return
    with tarfile.open(source, "r|*") as tar:
        for member in tar:
            file_of = tar.extractfile(member) if member.isreg() else None
            if file_of is None:
                raise StateError(f"{source} is no backup: {member.name!r} is no file")
            yield member.name, file_of


def _sync_tree(folder: Path) -> None:
    for where, _, files in os.walk(folder):
        for name in files:
            sync_path(Path(where, name))
        sync_path(Path(where))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
