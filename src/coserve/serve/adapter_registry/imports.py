"""Copies foreign adapters into the state folder. Only their configuration and weights are opened."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from coserve.adapters.folder import CONFIG, WEIGHTS, unreadable
from coserve.core import disk
from coserve.errors import AdapterError

MOST_CONFIG_BYTES = 2**20
_PIECE = 2**20
_LONGEST_BASE = 200  # characters of a name in messages


def folder_below(root: Path, path: str) -> Path:
    """The real folder of `path` relative to `root`.

    Raises the same AdapterError for a missing folder and one outside of the root, so that callers cannot
    probe for files.
    """
    outside = AdapterError(f"no adapter at {path!r} below the server's adapter root")
    if "\x00" in path:
        raise outside
    try:
        real, top = (root / path).resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise outside from error
    if not real.is_relative_to(top) or not real.is_dir():
        raise outside
    return real


def copy_adapter(source: Path, target: Path, most_bytes: int) -> None:
    """Copies an adapter's folder atomically, with fsync. Raises AdapterError.

    `target` must not exist; `most_bytes` is the limit for the weights.
    """
    partial = target.with_name(f".{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_file(source / CONFIG, partial / CONFIG, MOST_CONFIG_BYTES)
        _check_json(partial / CONFIG)
        _copy_file(source / WEIGHTS, partial / WEIGHTS, most_bytes)
        disk.sync_path(partial)
        partial.rename(target)
        disk.sync_path(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def digest(folder: Path) -> str:
    """SHA-256 of an adapter's two files. Raises AdapterError where one is missing."""
    found = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{folder / name}: {error.strerror}") from error
    return found.hexdigest()


def other_base(folder: Path, *own: str) -> str | None:
    """The base in an adapter's configuration if it is not in `own`; None where the configuration names none
    or is unreadable. Only the last parts of names are compared, as paths differ between machines."""
    named = _named_base(folder)
    return None if not named or _last_part(named) in map(_last_part, own) else named[:_LONGEST_BASE]


def base_among(folder: Path, bases: Mapping[str, str]) -> str | None:
    """The one of some bases, names with folders, that an adapter's configuration names; None for another, or
    none."""
    last = _last_part(_named_base(folder) or "")
    return next((name for name, path in bases.items() if last in map(_last_part, (name, path))), None)


def _named_base(folder: Path) -> str | None:
    """The base in an adapter's configuration; None where it names none or is unreadable."""
    try:
        named = json.loads((folder / CONFIG).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    return named if isinstance(named, str) and _last_part(named) else None


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].strip().lower()


def _copy_file(source: Path, target: Path, most: int) -> None:
    """Copies a file of at most `most` bytes. Follows no symbolic link, which might have been created since
    the check."""
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = str(unreadable(source, error.strerror))  # where it lies is not for whoever sent the request
        raise AdapterError(reason.replace(f"{source.parent}{os.sep}", "")) from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise AdapterError(f"{source.name} is not a file")
    with os.fdopen(opened, "rb") as read, target.open("xb") as write:
        left = most
        while piece := read.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise AdapterError(f"{source.name} is larger than {most} bytes")
            write.write(piece)
        write.flush()
        os.fsync(write.fileno())


def _check_json(path: Path) -> None:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} does not hold an object")
