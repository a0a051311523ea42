"""Adapters from elsewhere: a hub name, an object store, or a web server. Nothing but an adapter's two files
is read, into a folder, with bounds and a hash where one was given.

A `.bin` file, a pickle, is rewritten as safetensors by a process of its own (`adapters/convert.py`).
"""

import hashlib
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from coserve.adapters.folder import CONFIG, PICKLED, WEIGHTS
from coserve.errors import AdapterError, StateError
from coserve.serve.artifacts.objects import SCHEMES, objects_at

MOST_BYTES: Final = 16 * 2**30  # of weights; the server that takes them has a bound of its own
_MOST_CONFIG: Final = 2**20
_HUB: Final = re.compile(r"(?:hf://)?([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,256}))?")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PIECE: Final = 2**20
_REDIRECTS: Final = 5
_SECONDS: Final = 30.0  # to connect, and of silence


class AdapterSource(Protocol):
    """A folder elsewhere."""

    @property
    def revision(self) -> str | None:
        """The commit that is read, where there is one."""
        ...

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a file. Raises FileNotFoundError where it is missing, and AdapterError."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter in `folder`, its weights' SHA-256 as they were elsewhere, and the commit they are of."""

    folder: Path
    sha256: str
    revision: str | None


def is_elsewhere(source: str) -> bool:
    """Tells whether a text names an adapter elsewhere: a URL, or a hub name that is no folder here."""
    return "://" in source or (not Path(source).exists() and _HUB.fullmatch(source) is not None)


def fetch_adapter(
    source: str, folder: Path, sha256: str | None = None, most_bytes: int = MOST_BYTES
) -> Fetched:
    """Brings an adapter into `folder`, which must not exist. `sha256` is that of its weights' file. Raises
    AdapterError, ConfigError and ModelNotFound; nothing is left then."""
    if sha256 is not None and not _SHA256.fullmatch(sha256.lower()):
        raise AdapterError(f"{sha256!r} is no SHA-256: expected 64 hexadecimal digits")
    found = source_of(source)
    folder.mkdir(parents=True)
    try:
        for name in (WEIGHTS, PICKLED):
            try:
                digest = _bring(found, source, name, folder, most_bytes)
                break
            except FileNotFoundError:
                continue
        else:
            raise AdapterError(f"{source} holds no {WEIGHTS} and no {PICKLED}")
        if sha256 is not None and digest != sha256.lower():
            raise AdapterError(f"{source} has weights with the SHA-256 {digest}, not {sha256.lower()}")
        try:
            _bring(found, source, CONFIG, folder, _MOST_CONFIG)
        except FileNotFoundError as error:
            raise AdapterError(f"{source} holds no {CONFIG}: it is no adapter of PEFT's") from error
        if name == PICKLED:
            folder = _converted(folder)
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        raise
    return Fetched(folder, digest, found.revision)


def source_of(source: str) -> AdapterSource:
    """The place that a text names. Raises AdapterError."""
    scheme = urlsplit(source).scheme if "://" in source else ""
    if scheme in SCHEMES:
        return _Stored(source)
    if scheme in ("https", "http"):
        return _Web(source)
    if (named := _HUB.fullmatch(source)) is not None:
        return _Hub(named[1], named[2])
    raise AdapterError(
        f"{source!r} names no adapter: expected a folder, a hub name such as owner/name@revision, or a URL "
        f"with https://, {', '.join(f'{one}://' for one in SCHEMES)}"
    )


class _Stored:
    """A prefix in an object store, whose credentials come from the environment."""

    revision: Final = None

    def __init__(self, url: str) -> None:
        self._objects = objects_at(url.rstrip("/"))

    def pieces(self, name: str) -> Iterator[bytes]:
        try:
            yield from self._objects.pieces(name)
        except StateError as error:
            raise AdapterError(f"{name} cannot be read there: {error}") from error


class _Web:
    """A folder of a web server. Without TLS it has to be on this machine, and redirects do not leave TLS."""

    revision: Final = None

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._check(self._url)

    def pieces(self, name: str) -> Iterator[bytes]:
        import httpx

        url = f"{self._url}/{name}"
        try:
            with httpx.Client(timeout=_SECONDS, trust_env=True) as client:
                for _ in range(_REDIRECTS + 1):
                    with client.stream("GET", url) as answer:
                        if answer.is_redirect:
                            assert answer.next_request is not None
                            self._check(url := str(answer.next_request.url))
                            continue
                        if answer.status_code in (404, 410):
                            raise FileNotFoundError(name)
                        if answer.status_code != 200:
                            raise AdapterError(f"{url} answers {answer.status_code}")
                        yield from answer.iter_bytes(_PIECE)
                        return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdapterError(f"{url} cannot be read: {error}") from error
        raise AdapterError(f"{self._url}/{name} redirects more than {_REDIRECTS} times")

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
            raise AdapterError(f"{url} is not fetched without TLS: expected https://")


class _Hub:
    """A repository of the hub, or of its cache on this machine; all files are those of one commit."""

    def __init__(self, name: str, revision: str | None) -> None:
        from coserve.model.hub import check_hub

        self._name = name
        check_hub(name, CONFIG, revision)
        self.revision: str | None = revision
        self._pin(self._file(CONFIG) or "")

    def pieces(self, name: str) -> Iterator[bytes]:
        found = self._file(name)
        if found is None:
            raise FileNotFoundError(name)
        with open(found, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def _pin(self, file: str) -> None:
        """Further files are those of the commit in whose folder of the cache the first is."""
        parts = Path(file).parts
        if "snapshots" in parts:
            self.revision = parts[parts.index("snapshots") + 1]

    def _file(self, name: str) -> str | None:
        """The file in the hub's cache, where it is brought; None where there is none."""
        from huggingface_hub import errors, hf_hub_download

        try:
            return str(hf_hub_download(self._name, name, revision=self.revision))
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            at = f" at {self.revision}" if self.revision else ""
            raise AdapterError(f"the hub has no {self._name}{at}, or none that you may read") from error
        except errors.RemoteEntryNotFoundError:
            return None
        except (errors.HfHubHTTPError, OSError, ValueError) as error:  # also LocalEntryNotFoundError
            reason = str(error).strip().partition("\n")[0]
            raise AdapterError(f"{self._name} cannot be read from the hub: {reason}") from error


def _bring(found: AdapterSource, source: str, name: str, folder: Path, most: int) -> str:
    """Writes a file of at most so many bytes; returns its SHA-256."""
    hashed, count = hashlib.sha256(), 0
    pieces = found.pieces(name)
    first = next(pieces, b"")  # raises before a file is made
    with (folder / name).open("xb") as file:
        while first:
            count += len(first)
            if count > most:
                raise AdapterError(f"{name} of {source} is larger than {most} bytes")
            hashed.update(first)
            file.write(first)
            first = next(pieces, b"")
    return hashed.hexdigest()


def _converted(folder: Path) -> Path:
    """The folder with safetensors in place of a pickle."""
    from coserve.adapters.convert import convert_adapter

    made, _ = convert_adapter(folder / PICKLED, folder.with_name(f"{folder.name}-safetensors"))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return made.rename(folder)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
