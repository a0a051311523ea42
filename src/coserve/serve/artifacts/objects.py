"""Objects by key, in a folder that several machines mount or in a store that speaks S3.

An object is whole or absent, whatever ends its writer. `create` is atomic among all writers.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from coserve.core import disk
from coserve.core.masking import masked
from coserve.errors import ConfigError, StateError

SCHEMES: Final = ("s3", "gs", "az")
_URL: Final = re.compile(r"([a-z0-9]+)://(.*)", re.DOTALL)
_PIECE: Final = 2**20  # bytes
_CONNECT_SECONDS, _SECONDS, _RETRY_SECONDS = 5, 60, 20  # to connect, of one request, and of all its retries
_RETRIES: Final = 4


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's key, and the time of its last change (Unix seconds)."""

    key: str
    changed: float


class Objects(Protocol):
    """Bytes by key. Keys have slashes between their parts. All methods block, and raise StateError where the
    store cannot be used now; a later call may succeed."""

    def write(self, key: str, source: Path) -> None:
        """Writes or replaces an object with a file's bytes."""

    def create(self, key: str, data: bytes, replace: bool = False) -> bool:
        """Writes a small object; False, and nothing, where there is one already, unless `replace`."""

    def read(self, key: str, most: int) -> bytes | None:
        """A small object; None where it is missing. Raises StateError for more than `most` bytes."""

    def pieces(self, key: str) -> Iterator[bytes]:
        """An object's bytes. Raises FileNotFoundError where it is missing."""

    def delete(self, key: str) -> None:
        """Deletes an object, if it is there."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """All objects whose keys begin with `prefix` and a slash."""


def objects_at(place: str) -> Objects:
    """The objects in a folder, or at a URL such as `s3://bucket/prefix`. Raises ConfigError."""
    found = _URL.fullmatch(place)
    if found is None:
        return FolderObjects(Path(place))
    if found[1] == "file":
        return FolderObjects(Path(found[2]))
    return RemoteObjects(place)


def check_place(place: str) -> None:
    """Raises ConfigError for a place that can be neither a folder nor a store."""
    found = _URL.fullmatch(place)
    if "\x00" in place or place != place.strip():
        raise ConfigError(
            f"artifacts is {masked(place)!r}: expected a folder, or a URL such as s3://bucket/prefix"
        )
    if found is not None and (found[1] not in (*SCHEMES, "file") or not found[2].strip("/")):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(
            f"artifacts is {masked(place)!r}: expected a folder, or a bucket's URL with {known}"
        )


class FolderObjects:
    """Objects as files in a folder, on the network or not. Raises ConfigError where it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the artifacts' folder {folder} cannot be used: {error.strerror}") from error

    def write(self, key: str, source: Path) -> None:
        with self._explained(key), source.open("rb") as read, self._partial(key) as partial:
            with partial.open("xb") as file:
                shutil.copyfileobj(read, file, _PIECE)
                _sync(file)
            partial.rename(self._folder / key)

    def create(self, key: str, data: bytes, replace: bool = False) -> bool:
        with self._explained(key), self._partial(key) as partial:
            with partial.open("xb") as file:
                file.write(data)
                _sync(file)
            if replace:
                partial.rename(self._folder / key)
                return True
            try:
                os.link(partial, self._folder / key)
            except FileExistsError:
                return False
            return True

    def read(self, key: str, most: int) -> bytes | None:
        with self._explained(key):
            try:
                with (self._folder / key).open("rb") as file:
                    data = file.read(most + 1)
            except FileNotFoundError:
                return None
        return _of_size(key, data, most)

    def pieces(self, key: str) -> Iterator[bytes]:
        with self._explained(key), (self._folder / key).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def delete(self, key: str) -> None:
        path = self._folder / key
        with self._explained(key):
            path.unlink(missing_ok=True)
            for parent in path.relative_to(self._folder).parents[:-1]:
                try:
                    (self._folder / parent).rmdir()
                except OSError:  # it has others
                    return

    def list(self, prefix: str) -> Iterator[StoredObject]:
        with self._explained(prefix):
            for folder, _, names in os.walk(self._folder / prefix):
                for name in names:
                    path = Path(folder, name)
                    try:
                        changed = path.stat().st_mtime
                    except FileNotFoundError:  # deleted meanwhile
                        continue
                    if not name.startswith("."):
                        yield StoredObject(str(path.relative_to(self._folder)), changed)

    @contextmanager
    def _partial(self, key: str) -> Iterator[Path]:
        """Context with a name of its own for a file beside `key`, which is gone or renamed at its end."""
        path = self._folder / key
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        for attempt in range(3):  # a deletion of the last file there removes the folder
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.touch(exist_ok=False)
                break
            except FileNotFoundError:
                if attempt == 2:
                    raise
        partial.unlink()
        try:
            yield partial
            disk.sync_path(path.parent)
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unusable(str(self._folder), key, error.strerror or str(error)) from error


class RemoteObjects:
    """Objects in a store that speaks S3, or Google's or Azure's own protocol. Credentials, region and
    endpoint come from the environment, by these stores' own names (`AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT_URL`). Raises ConfigError without the extra `s3`, or for a URL that cannot be one."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(
                f"artifacts at {masked(url)} need the extra s3: pip install 'coserve[s3]'"
            ) from error
        self._url, self._library, self._error = masked(url), obstore, BaseError
        self._exists, self._missing = AlreadyExistsError, NotFoundError
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options: dict[str, Any] = {
            "connect_timeout": f"{_CONNECT_SECONDS}s",
            "timeout": f"{_SECONDS}s",
            "allow_http": endpoint.startswith("http://"),
        }
        retries: dict[str, Any] = {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        }
        try:
            made: Any = from_url  # typed by the kind of the URL, which is not known here
            self._store = made(url, client_options=options, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise ConfigError(masked(f"artifacts at {url} cannot be used: {_first_line(error)}")) from error

    def write(self, key: str, source: Path) -> None:
        with self._explained(key):
            self._library.put(self._store, key, source)

    def create(self, key: str, data: bytes, replace: bool = False) -> bool:
        with self._explained(key):
            try:
                self._library.put(self._store, key, data, mode="overwrite" if replace else "create")
            except self._exists:
                return False
            return True

    def read(self, key: str, most: int) -> bytes | None:
        try:
            data = b""
            for piece in self.pieces(key):
                data += piece
                if len(data) > most:
                    break
        except FileNotFoundError:
            return None
        return _of_size(key, data, most)

    def pieces(self, key: str) -> Iterator[bytes]:
        with self._explained(key):
            for piece in self._library.get(self._store, key).stream(_PIECE):
                yield bytes(piece)

    def delete(self, key: str) -> None:
        with self._explained(key):
            try:
                self._library.delete(self._store, key)
            except (FileNotFoundError, self._missing):
                return

    def list(self, prefix: str) -> Iterator[StoredObject]:
        with self._explained(prefix):
            for chunk in self._library.list(self._store, prefix):
                for each in chunk:
                    yield StoredObject(each["path"], each["last_modified"].timestamp())

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except self._missing as error:
            raise FileNotFoundError(key) from error
        except (self._error, OSError) as error:
            raise unusable(self._url, key, _first_line(error)) from error


def unusable(place: str, key: str, reason: str) -> StateError:
    """The error for a store that cannot be used now."""
    return StateError(
        f"the artifact store {place} cannot be used now ({key}: {reason}); nothing was changed, try again"
    )


def _of_size(key: str, data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise StateError(f"the artifact store holds more than {most} bytes at {key}, which is no manifest")
    return data


def _first_line(error: BaseException) -> str:
    return masked(str(error).strip().partition("\n")[0])[:300] or type(error).__name__


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
