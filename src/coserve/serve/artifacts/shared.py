"""Artifacts that several servers share, of which each keeps some in its state folder.

An artifact `adapters/adapter-1` is an object for each of its files, named by the SHA-256 of the bytes, and
`artifact.json`, the manifest, which names them and is written last: without it there is no artifact.

    adapters/adapter-1/artifact.json        {"files": {"adapter_config.json": {"sha256": ..., "bytes": ...}}}
    adapters/adapter-1/<sha256>             a file's bytes
"""

import asyncio
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

import msgspec

from coserve.core import disk
from coserve.errors import CoserveError, StateError
from coserve.serve.artifacts.local import remove, remove_parts
from coserve.serve.artifacts.objects import Objects
from coserve.serve.offload import TenantTurns
from coserve.serve.store.durable import partial_of, settle

log = logging.getLogger(__name__)

MANIFEST: Final = "artifact.json"
MOST_MANIFEST: Final = 2**20  # bytes
MOST_FILES: Final = 4096  # of one artifact
KEPT_SECONDS: Final = 60.0  # for which what was used stays, whatever the bound: work with it is under way
ORPHAN_SECONDS: Final = 86_400.0  # after which objects without a row are nobody's, not one's being put
THREADS: Final = 8
ATTEMPTS: Final = 2  # downloads of a file whose hash is wrong
R = TypeVar("R")
Given = TypeVarTuple("Given")


class ArtifactFile(msgspec.Struct, frozen=True):
    """A file of an artifact."""

    sha256: str
    bytes: int


class ArtifactManifest(msgspec.Struct, frozen=True):
    """The files of an artifact by their names in it; an artifact that is one file has it by an empty name."""

    files: dict[str, ArtifactFile]


class SharedArtifacts:
    """Puts artifacts into a store that all servers reach, and keeps the latest used ones here, of
    `most_bytes` in all. An `ArtifactStore`; for one event loop.

    `may_leave` is asked before a copy is deleted here, by the artifact's name, and ends what needs it.
    """

    def __init__(self, folder: Path, objects: Objects, most_bytes: int) -> None:
        self._folder, self._objects, self._most = folder, objects, most_bytes
        self.may_leave: Callable[[str], Awaitable[bool]] = _always
        self.downloads = self.downloaded_bytes = self.evictions = 0
        self._threads = ThreadPoolExecutor(THREADS, "artifacts")
        self._turns = TenantTurns()  # by artifact
        self._held: OrderedDict[str, tuple[int, float]] = OrderedDict()  # bytes and last use, oldest first
        self._bytes = 0
        self._tidying: asyncio.Task[None] | None = None
        self._changing: set[asyncio.Task[None]] = set()

    async def put(self, path: Path, replace: bool = False) -> None:
        """As `ArtifactStore.put`."""
        async with self._turns.of(str(path)):
            await self._run(self._put, path, replace)
            self._note(path, await self._run(_size, path))

    async def get(self, path: Path) -> Path:
        """As `ArtifactStore.get`. Files are compared with their hashes as they come."""
        if not path.is_relative_to(self._folder):  # the operator's own
            return path
        async with self._turns.of(str(path)):
            size = await self._run(self._get, path)
            if size is not None:
                self._note(path, size)
        return path

    def is_here(self, path: Path) -> bool:
        """As `ArtifactStore.is_here`."""
        return path.exists()

    async def discard(self, path: Path) -> None:
        """As `ArtifactStore.discard`. The store deletes it a little later; what it cannot delete, `sweep`
        does."""
        if not path.is_relative_to(self._folder):
            return
        async with self._turns.of(str(path)):
            self._forget(path)
            await self._run(remove, path)
        self._later(path, self._delete, self._name(path))

    async def trim(self, path: Path, names: Collection[str]) -> None:
        """As `ArtifactStore.trim`. The store does so a little later, or not at all."""
        was_here = await self._run(path.exists)
        async with self._turns.of(str(path)):
            has_removed = await self._run(remove_parts, path, names)
        if has_removed or not was_here:  # else the store has done so before
            self._later(path, self._trim, self._name(path), frozenset(names))

    def _later(self, path: Path, work: Callable[[*Given], object], *given: *Given) -> None:
        """Changes the store beside the caller, who holds locks that others wait for."""

        async def change() -> None:
            try:
                async with self._turns.of(str(path)):
                    await self._run(work, *given)
            except StateError as error:
                log.warning("%s stays in the artifact store: %s", self._name(path), error)

        task = asyncio.create_task(change())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def settled(self) -> None:
        """Returns once the store has what was asked so far."""
        while self._changing:
            await asyncio.wait(self._changing)

    async def adopt(self) -> None:
        """Takes note of what is here, and puts what the store lacks: an earlier start had no store. Raises
        StateError."""
        for name in await self._run(lambda: list(self._here())):
            path = self._folder / name
            async with self._turns.of(str(path)):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    await self._run(self._adopt, path)
                    self._note(path, await self._run(_size, path))

    async def sweep(self, part: str, known: Collection[str], now: float) -> None:
        """Deletes artifacts of a part, such as `adapters`, that are not `known` by name and old enough, at
        the time `now` of the service's clock, for nobody's being about to add their row. Raises
        StateError."""

        def orphans() -> list[str]:
            old = {
                one.key.rpartition("/")[0]
                for one in self._objects.list(part)
                if now - one.changed > ORPHAN_SECONDS
            }
            return sorted(old - set(known))

        for name in await self._run(orphans):
            await self._run(self._delete, name)

    def close(self) -> None:
        """Ends its threads. Uploads under way end first."""
        if self._tidying is not None:
            self._tidying.cancel()
        self._threads.shutdown()

    # On threads

    def _put(self, path: Path, replace: bool) -> None:
        name, files = self._name(path), dict(_files(path))
        if len(files) > MOST_FILES:
            raise StateError(f"{name} has {len(files)} files, and an artifact may have {MOST_FILES}")
        own = ArtifactManifest({each: _described(file) for each, file in files.items()})
        held = self._manifest(name)
        if held == own:
            return
        if held is None or replace:
            for each, file in files.items():
                self._objects.write(f"{name}/{own.files[each].sha256}", file)
            if self._objects.create(f"{name}/{MANIFEST}", msgspec.json.encode(own), replace):
                return
            held = self._manifest(name)
        if held is None:
            raise StateError(f"{name} was deleted while it was put: nothing was kept, try again")
        if held != own:
            self._bring(path, held)

    def _get(self, path: Path) -> int | None:
        """The bytes at `path`, where it is now; None for an artifact that is nowhere."""
        if not path.exists():
            manifest = self._manifest(self._name(path))
            if manifest is None:
                return None
            try:
                self._bring(path, manifest)
            except FileNotFoundError:  # deleted meanwhile
                return None
        return _size(path)

    def _adopt(self, path: Path) -> None:
        if self._manifest(self._name(path)) is None:
            self._put(path, False)

    def _bring(self, path: Path, manifest: ArtifactManifest) -> None:
        """Makes or replaces what is at `path`: a reader sees all of it, or what was there before."""
        partial, name = partial_of(path), self._name(path)
        remove(partial)
        try:
            if "" in manifest.files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._download(name, manifest.files[""], partial)
            else:
                disk.make_folder(partial)
                for each, file in manifest.files.items():
                    self._download(name, file, partial / each)
                disk.sync_path(partial)
            if path.is_dir():
                remove(path)  # a folder cannot be replaced in one step
            settle(partial, path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StateError(f"{name} cannot be kept here: {error.strerror or error}") from error
        finally:
            remove(partial)
        self.downloads += 1
        self.downloaded_bytes += sum(file.bytes for file in manifest.files.values())

    def _download(self, name: str, file: ArtifactFile, target: Path) -> None:
        for attempt in range(ATTEMPTS):
            found = hashlib.sha256()
            with target.open("wb") as write:
                for piece in self._objects.pieces(f"{name}/{file.sha256}"):
                    found.update(piece)
                    write.write(piece)
                write.flush()
                os.fsync(write.fileno())
            if found.hexdigest() == file.sha256:
                return
            log.warning("%s/%s came damaged (attempt %d)", name, file.sha256, attempt + 1)
        raise StateError(f"{name} is damaged in the artifact store: a file's hash is not {file.sha256}")

    def _delete(self, name: str) -> None:
        """Deletes an artifact, or all below a folder: manifests first, so that none is seen without files."""
        keys = [one.key for one in self._objects.list(name)]
        for key in sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")):
            self._objects.delete(key)

    def _trim(self, name: str, names: Collection[str]) -> None:
        held = self._manifest(name)
        if held is None or not held.files.keys() & names:
            return
        left = {each: file for each, file in held.files.items() if each not in names}
        self._objects.create(f"{name}/{MANIFEST}", msgspec.json.encode(ArtifactManifest(left)), replace=True)
        used = {file.sha256 for file in left.values()}
        for gone in {file.sha256 for file in held.files.values()} - used:
            self._objects.delete(f"{name}/{gone}")

    def _manifest(self, name: str) -> ArtifactManifest | None:
        data = self._objects.read(f"{name}/{MANIFEST}", MOST_MANIFEST)
        if data is None:
            return None
        try:
            found = msgspec.json.decode(data, type=ArtifactManifest)
        except msgspec.DecodeError as error:
            raise StateError(f"the manifest of {name} in the artifact store is damaged: {error}") from error
        if len(found.files) > MOST_FILES or any(not _is_plain(each) for each in found.files):
            raise StateError(
                f"the manifest of {name} in the artifact store is damaged: it names no plain files"
            )
        return found

    def _here(self) -> Iterator[str]:
        """Names of what is here, the least recently changed first."""
        patterns = ("adapters/*", "tinker/*", "files/*", "jobs/*/checkpoints/*")
        found = [path for each in patterns for path in self._folder.glob(each) if path.name[0] != "."]
        return (self._name(path) for path in sorted(found, key=lambda path: path.stat().st_mtime))

    # Copies here

    def _note(self, path: Path, size: int) -> None:
        """Takes note of a use; too many copies are deleted beside it."""
        self._bytes += size - self._held.pop(self._name(path), (0, 0.0))[0]
        self._held[self._name(path)] = (size, time.monotonic())
        if self._bytes > self._most and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._make_room())

    def _forget(self, path: Path) -> None:
        """Forgets what is at a path, and below it."""
        name = self._name(path)
        for each in [each for each in self._held if each == name or each.startswith(f"{name}/")]:
            self._bytes -= self._held.pop(each)[0]

    async def _make_room(self) -> None:
        """Deletes the least recently used copies beyond the bound, but for those that are used now."""
        for name, (_, used) in list(self._held.items()):
            if self._bytes <= self._most:
                return
            if time.monotonic() - used < KEPT_SECONDS:
                continue
            path = self._folder / name
            try:
                async with self._turns.of(str(path)):
                    if name in self._held and self._held[name][1] == used and await self.may_leave(name):
                        await self._run(self._adopt, path)  # never the only copy
                        await self._run(remove, path)
                        self._forget(path)
                        self.evictions += 1
            except (CoserveError, OSError) as error:
                log.warning("the copy of %s stays: %s", name, error)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    async def _run(self, work: Callable[[*Given], R], *given: *Given) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)


async def _always(_: str) -> bool:
    return True


def _files(path: Path) -> Mapping[str, Path]:
    """The files of an artifact by their names in it."""
    if path.is_dir():
        return {each.name: each for each in sorted(path.iterdir()) if each.is_file()}
    return {"": path}


def _described(file: Path) -> ArtifactFile:
    with file.open("rb") as read:
        return ArtifactFile(hashlib.file_digest(read, "sha256").hexdigest(), file.stat().st_size)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path).values())


def _is_plain(name: str) -> bool:
    return "/" not in name and "\x00" not in name and not name.startswith(".")
