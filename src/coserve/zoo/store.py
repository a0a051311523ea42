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
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import ZooError
from coserve.zoo.alternatives import AlternativeFolder, StoredAlternative, check_fits
from coserve.zoo.chain import check_connects
from coserve.zoo.disk import make_folder, remove_file, sync_folder
from coserve.zoo.folders import FileObjects
from coserve.zoo.manifest import Application, check_name, read_manifest, write_manifest
from coserve.zoo.tensors import TensorStore
from coserve.zoo.weight_file import parse_header

_MARK: Final = "zoo.json"
_FOLDERS: Final = ("tensors", "files", "applications", "alternatives", "measured", "views")
_LOCK: Final = "lock"
_SUFFIX: Final = ".json"


class _ZooMark(msgspec.Struct, frozen=True):
    zoo: str = "coserve"


@dataclass(frozen=True, slots=True)
class Collected:
    """Files and bytes that `gc` removed."""

    files: int
    nbytes: int


class Zoo:
    """An existing zoo. Reading takes no lock; whoever changes it does so within `writing`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ZooError where there is no zoo."""
        self.folder = Path(folder)
        if not (self.folder / _MARK).is_file():
            raise ZooError(f"there is no zoo at {folder}: `coserve zoo add` makes one")
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
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            yield
        except BlockingIOError as error:
            raise ZooError(f"another process changes {self.folder}: try again when it is done") from error
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            raise ZooError(f"the zoo cannot be changed:{where} {error.strerror}") from error
        finally:
            os.close(handle)

    def applications(self) -> dict[str, Application]:
        """All applications by name, in order. Raises ZooError for a damaged manifest."""
        return {name: self.application(name) for name in self.names()}

    def names(self) -> list[str]:
        """Names of all applications, in order."""
        files = (self.folder / "applications").glob(f"*{_SUFFIX}")
        return sorted(file.name.removesuffix(_SUFFIX) for file in files if not file.name.startswith("."))

    def application(self, name: str) -> Application:
        """The application called `name`. Raises ZooError."""
        check_name(name)
        if name not in (names := self.names()):
            there = ", ".join(names) or "nothing"
            raise ZooError(f"the zoo has no {name!r}; it has {there}")
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
        self.files.folder.sync()
        write_manifest(self._manifest(one.name), one)
        sync_folder(self.folder / "applications")

    def check_free(self, name: str) -> None:
        """Raises ZooError for what can be no name, and for a name that is taken."""
        check_name(name)
        if name in self.names() or name in self.alternatives.names():
            raise ZooError(f"the zoo has {name!r} already: remove it first, or give another --name")

    def remove(self, name: str) -> None:
        """Removes an application or an alternative; `gc` frees what only it had. Raises ZooError where others
        need it."""
        with self.writing():
            if name in self.alternatives.names():
                self.alternatives.remove(name)
                return
            self.application(name)
            if children := [one.name for one in self.applications().values() if one.parent == name]:
                raise ZooError(f"{name} is the parent of {', '.join(children)}: remove these first")
            if needing := self.alternatives.of_model(name):
                raise ZooError(f"{', '.join(needing)} belong to {name}: remove these first")
            remove_file(self._manifest(name))
            sync_folder(self.folder / "applications")

    def gc(self) -> Collected:
        """Removes all files that no application refers to. Raises ZooError for a damaged manifest, as what
        it refers to is not known."""
        with self.writing():
            applications = self.applications()
            others = {key for one in self.alternatives.all().values() for key in one.tensors.values()}
            tensors = self.reachable(applications) | self._with_roots(others)
            files = {key for one in applications.values() for key in one.file_keys()}
            digests = {one.digest for one in applications.values()}
            count = nbytes = 0
            doomed = [*self.tensors.leftovers(), *self.files.folder.leftovers()]
            doomed += [
                path for name in ("applications", "alternatives", "measured") for path in self._partials(name)
            ]
            doomed += [self.tensors.path(key) for key in self.tensors.all_keys() if key not in tensors]
            doomed += [
                self.files.folder.path(key) for key in self.files.folder.all_keys() if key not in files
            ]
            doomed += [path for path in self._measurements() if not set(path.stem.split("-")) <= digests]
            for path in doomed:
                count, nbytes = count + 1, nbytes + path.lstat().st_size
                remove_file(path)
            for view in (self.folder / "views").iterdir():
                if view.name.partition(".")[0] not in digests:
                    shutil.rmtree(view)
            return Collected(count, nbytes)

    def reachable(self, applications: Mapping[str, Application]) -> set[str]:
        """Ids of the tensors that applications need, those included that others are differences from. Raises
        ZooError for a missing one."""
        return self._with_roots({key for one in applications.values() for key in one.tensor_keys()})

    def nbytes(self, applications: Mapping[str, Application]) -> int:
        """Bytes of all files that these applications need: weights, others and manifests."""
        files = {key for one in applications.values() for key in one.file_keys()}
        return (
            sum(map(self.tensors.nbytes, self.reachable(applications)))
            + sum(map(self.files.folder.nbytes, files))
            + sum(self._manifest(name).stat().st_size for name in applications)
        )

    def verify(self) -> list[str]:
        """Reads everything; the problems found, none for a zoo that is whole."""
        problems: list[str] = []
        applications: dict[str, Application] = {}
        for name in self.names():
            try:
                applications[name] = self.application(name)
            except ZooError as error:
                problems.append(str(error))
        alternatives = dict[str, StoredAlternative]()
        for name in self.alternatives.names():
            try:
                alternatives[name] = self.alternatives.get(name)
                check_fits(alternatives[name], applications)
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
            except (ZooError, ValueError, KeyError, TypeError) as error:
                yield str(error)
        if one.parent and one.parent not in others:
            yield f"its parent {one.parent} is not in the zoo"
            return
        try:
            check_connects(one, others.get(one.parent))
        except ZooError as error:
            yield str(error)

    def _with_roots(self, keys: set[str]) -> set[str]:
        return keys | {self.tensors.root_of(key) for key in keys}

    def _manifest(self, name: str) -> Path:
        return self.folder / "applications" / f"{name}{_SUFFIX}"

    def _partials(self, name: str) -> list[Path]:
        return sorted((self.folder / name).glob(".*"))

    def _measurements(self) -> list[Path]:
        return [path for path in sorted(self.measured.glob(f"*{_SUFFIX}")) if not path.name.startswith(".")]


def check_unlocked(zoo: Zoo) -> None:
    """Raises ZooError while another process changes the zoo: before work that would end in a change."""
    with zoo.writing():
        pass
