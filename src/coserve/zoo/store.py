"""The zoo's folder: tensors and files each once, and a manifest for each application.

| path | contents |
|---|---|
| `zoo.json` | the format |
| `tensors/` | tensors by content (`zoo/tensors.py`) |
| `files/` | configurations, tokenizers, headers of weights, by content |
| `applications/` | a manifest for each model or adapter, by name |
| `alternatives/` | a manifest for each alternative (`zoo/alternatives.py`), by name |
| `measured/` | equivalences (`zoo/equivalence.py`), profiles (`zoo/profile.py`) |
| `views/` | copies of applications for servers; can be made again |
| `lock` | held by a process that changes the zoo |

An application is there once its manifest is, which is written last and removed first. So whatever ends a
process leaves a zoo in which every application is whole, and files that nobody refers to, which `gc` removes.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import ZooError
from coserve.zoo.alternatives import AlternativeFolder, StoredAlternative, check_fits
from coserve.zoo.chain import check_ancestry, check_connects
from coserve.zoo.disk import (
    check_no_link,
    folder_entries,
    make_folder,
    remove_file,
    remove_folder,
    sync_folder,
)
from coserve.zoo.folders import FileObjects
from coserve.zoo.manifest import SUFFIX, Application, check_name, names_in, read_manifest, write_manifest
from coserve.zoo.tensors import TensorStore
from coserve.zoo.weight_file import parse_header

_MARK: Final = "zoo.json"
_FOLDERS: Final = ("tensors", "files", "applications", "alternatives", "measured", "views")
_LOCK: Final = "lock"


class _ZooMark(msgspec.Struct, frozen=True):
    zoo: str = "coserve"


@dataclass(frozen=True, slots=True)
class Collected:
    """Files and bytes that `gc` removed, and sentences on what it left."""

    files: int
    nbytes: int
    left: tuple[str, ...] = ()


class Zoo:
    """An existing zoo. Reading takes no lock; whoever changes it does so within `writing`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ZooError where there is no zoo, and where a folder of it is a symbolic link."""
        self.folder = Path(folder)
        if not (self.folder / _MARK).is_file():
            raise ZooError(f"there is no zoo at {folder}: `coserve zoo add` makes one")
        for name in _FOLDERS:
            check_no_link(self.folder / name)
        read_manifest(self.folder / _MARK, _ZooMark)
        self.tensors = TensorStore(self.folder / "tensors")
        self.files = FileObjects(self.folder / "files")
        self.alternatives = AlternativeFolder(self.folder / "alternatives")
        self.measured = self.folder / "measured"

    @classmethod
    def create(cls, folder: str | Path) -> "Zoo":
        """The zoo at a folder, made if nothing is there. Raises ZooError for a folder of something else."""
        folder = Path(folder)
        try:
            if not (folder / _MARK).exists():
                strangers = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
                if strangers - {*_FOLDERS, _LOCK, f".{_MARK}.partial"} or folder.is_file():
                    raise ZooError(f"{folder} is no zoo, and not empty: give a new folder")
                for name in _FOLDERS:
                    make_folder(folder / name)
                write_manifest(folder / _MARK, _ZooMark())
                sync_folder(folder)
        except OSError as error:
            raise ZooError(f"no zoo can be made at {folder}: {error.strerror}") from error
        return cls(folder)

    @contextmanager
    def writing(self, waits: bool = False) -> Iterator[None]:
        """Context in which this process alone changes the zoo. Raises ZooError while another one does, unless
        it `waits` for its end, so that long work is not lost; and for a disk that is full or fails."""
        check_no_link(self.folder / _LOCK)
        handle = None
        try:
            handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            yield
        except BlockingIOError as error:
            raise ZooError(f"another process changes {self.folder}: try again when it is done") from error
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            raise ZooError(f"the zoo cannot be changed:{where} {error.strerror}") from error
        finally:
            if handle is not None:
                os.close(handle)

    def applications(self) -> dict[str, Application]:
        """All applications by name, in order. Raises ZooError for a damaged manifest, and for an application
        that is its own ancestor."""
        found = {name: self.application(name) for name in self.names()}
        check_ancestry(found)
        return found

    def names(self) -> list[str]:
        """Names of all applications, in order."""
        return names_in(self.folder / "applications")

    def application(self, name: str) -> Application:
        """The application called `name`. Raises ZooError."""
        self._check_there(name)
        found = read_manifest(self._manifest(name), Application)
        if found.name != name:
            raise ZooError(f"{self._manifest(name)} is damaged: it is the manifest of {found.name!r}")
        return found

    def publish(self, one: Application | StoredAlternative) -> None:
        """Adds an application or an alternative all of whose tensors and files are stored, for good. Raises
        ZooError where an alternative does not fit the models that are there now."""
        self.tensors.sync()
        if isinstance(one, StoredAlternative):
            check_fits(one, self.applications())
            self.alternatives.write(one)
            return
        self.files.sync()
        write_manifest(self._manifest(one.name), one)
        sync_folder(self.folder / "applications")

    def check_free(self, name: str) -> None:
        """Raises ZooError for what can be no name, and for a name that is taken."""
        check_name(name)
        if name in self.names() or name in self.alternatives.names():
            raise ZooError(f"the zoo has {name!r} already: remove it first, or give another --name")

    def remove(self, name: str) -> None:
        """Removes an application or an alternative, a damaged one too; `gc` frees what only it had. Raises
        ZooError where others need it."""
        with self.writing():
            if name in self.alternatives.names():
                self.alternatives.remove(name)
                return
            self._check_there(name)
            applications, alternatives, _ = self._readable()
            one = applications.get(name)
            if children := [
                child.name
                for child in applications.values()
                if child.parent == name and not (one and one.parent and _descends(one, child, applications))
            ]:
                raise ZooError(f"{name} is the parent of {', '.join(children)}: remove these first")
            if needing := [each.name for each in alternatives.values() if name in each.models]:
                raise ZooError(f"{', '.join(needing)} belong to {name}: remove these first")
            remove_file(self._manifest(name))
            sync_folder(self.folder / "applications")

    def gc(self) -> Collected:
        """Removes all files that nothing refers to. It goes on beside a damaged manifest, whose tensors and
        files are not known, and leaves all that this may need."""
        with self.writing():
            applications, alternatives, damaged = self._readable()
            left = [*damaged.values()]
            keys = {key for one in applications.values() for key in one.tensor_keys()}
            keys |= {key for one in alternatives.values() for key in one.tensors.values()}
            tensors, unknown = self._with_known_roots(keys)
            left += unknown
            files = {key for one in applications.values() for key in one.file_keys()}
            digests = {one.digest for one in applications.values()}
            doomed = [*self.tensors.leftovers(), *self.files.leftovers()]
            doomed += [
                path for name in ("applications", "alternatives", "measured") for path in self._partials(name)
            ]
            if not left:
                doomed += [path for key, path in self.tensors.all_files() if key not in tensors]
            if not damaged.keys() & {*self.names()}:
                doomed += [path for key, path in self.files.all_files() if key not in files]
                doomed += [path for path in self._measurements() if not set(path.stem.split("-")) <= digests]
            count = nbytes = 0
            for path in doomed:
                count, nbytes = count + 1, nbytes + path.lstat().st_size
                remove_file(path)
            for view in folder_entries(self.folder / "views"):
                if not view.is_symlink() and view.name.partition(".")[0] not in digests:
                    remove_folder(Path(view.path))
            told = "\n".join(left)
            links = [str(link) for link in self._links() if str(link) not in told]
            left += [f"{link} is a symbolic link, which is left as it is" for link in links]
            return Collected(count, nbytes, tuple(left))

    def with_roots(self, keys: set[str]) -> set[str]:
        """Ids of tensors with those that they are differences from. Raises ZooError for a missing one."""
        return keys | {self.tensors.root_of(key) for key in keys}

    def nbytes(self, applications: Mapping[str, Application]) -> int:
        """Bytes of all files that these applications need: weights, others and manifests."""
        tensors = {key for one in applications.values() for key in one.tensor_keys()}
        files = {key for one in applications.values() for key in one.file_keys()}
        return (
            sum(map(self.tensors.nbytes, self.with_roots(tensors)))
            + sum(map(self.files.nbytes, files))
            + sum(self._manifest(name).lstat().st_size for name in applications)
        )

    def verify(self) -> list[str]:
        """Reads everything; the problems found, none for a zoo that is whole."""
        applications, alternatives, unreadable = self._readable()
        problems = [*unreadable.values()]
        try:
            check_ancestry(applications)
        except ZooError as error:
            problems.append(str(error))
        for alternative in alternatives.values():
            try:
                check_fits(alternative, applications)
            except ZooError as error:
                problems.append(str(error))
        damaged = dict[str, str]()
        needed = {key for one in applications.values() for key in one.tensor_keys()}
        needed |= {key for one in alternatives.values() for key in one.tensors.values()}
        for key in sorted(needed):
            try:
                self.tensors.checked(key)
            except ZooError as error:
                damaged[key] = str(error)
        for application in applications.values():
            problems += [f"{application.name}: {why}" for why in self._problems(application, applications)]
            hurt = [damaged[key] for key in dict.fromkeys(application.tensor_keys()) if key in damaged]
            problems += [f"{application.name}: {why}" for why in hurt]
        for one in alternatives.values():
            problems += [f"{one.name}: {damaged[key]}" for key in one.tensors.values() if key in damaged]
        return problems

    def _problems(self, one: Application, others: Mapping[str, Application]) -> Iterator[str]:
        """Problems of an application, its tensors aside."""
        for key in dict.fromkeys(one.files.values()):
            try:
                self.files.read(key)
            except ZooError as error:
                yield str(error)
        for name, entry in one.weights.items():
            try:
                _, fields = parse_header(self.files.read(entry.header))
                if set(fields) != set(entry.tensors):
                    yield f"{name} has other tensors than its header"
            except ZooError as error:
                yield str(error)
        if one.parent and one.parent not in others:
            yield f"its parent {one.parent} is not in the zoo"
            return
        try:
            check_connects(one, others.get(one.parent))
        except ZooError as error:
            yield str(error)

    def _with_known_roots(self, keys: set[str]) -> tuple[set[str], list[str]]:
        """Ids with those that they are differences from, and why the latter of some are not known."""
        found, unknown = {*keys}, list[str]()
        for key in sorted(keys):
            try:
                if os.path.lexists(self.tensors.path(key)):  # a missing one needs nothing
                    found.add(self.tensors.root_of(key))
            except ZooError as error:
                unknown.append(str(error))
        return found, unknown

    def _readable(self) -> tuple[dict[str, Application], dict[str, StoredAlternative], dict[str, str]]:
        """Applications and alternatives whose manifests can be read, and by name why others cannot."""
        applications, alternatives = dict[str, Application](), dict[str, StoredAlternative]()
        damaged = dict[str, str]()
        for name in self.names():
            try:
                applications[name] = self.application(name)
            except ZooError as error:
                damaged[name] = str(error)
        for name in self.alternatives.names():
            try:
                alternatives[name] = self.alternatives.get(name)
            except ZooError as error:
                damaged[name] = str(error)
        return applications, alternatives, damaged

    def _check_there(self, name: str) -> None:
        """Raises ZooError for what is no application's name, or none of this zoo."""
        check_name(name)
        if name not in (names := self.names()):
            raise ZooError(f"the zoo has no {name!r}; it has {', '.join(names) or 'nothing'}")

    def _manifest(self, name: str) -> Path:
        return self.folder / "applications" / f"{name}{SUFFIX}"

    def _partials(self, name: str) -> list[Path]:
        """Manifests that a killed process did not complete."""
        return [
            Path(entry.path)
            for entry in folder_entries(self.folder / name)
            if entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
        ]

    def _measurements(self) -> list[Path]:
        return [self.measured / f"{name}{SUFFIX}" for name in names_in(self.measured)]

    def _links(self) -> Iterator[Path]:
        """Symbolic links in the zoo."""
        yield from self.tensors.links()
        yield from self.files.links()
        for name in ("applications", "alternatives", "measured", "views"):
            yield from (Path(one.path) for one in folder_entries(self.folder / name) if one.is_symlink())


def _descends(one: Application, other: Application, applications: Mapping[str, Application]) -> bool:
    """Tells whether an application was made of another one, at any remove."""
    line = set[str]()
    while one.name not in line and (parent := applications.get(one.parent)) is not None:
        line.add(one.name)
        one = parent
        if one.name == other.name:
            return True
    return False


def check_unlocked(zoo: Zoo) -> None:
    """Raises ZooError while another process changes the zoo: before work that would end in a change."""
    with zoo.writing():
        pass
