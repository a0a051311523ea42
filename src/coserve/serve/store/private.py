"""File permissions: a state folder is readable by its owner only, as it holds prompts, training data, weights
and hashes of keys."""

import os
import stat
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError

OWNER_ONLY: Final = 0o077  # forbidden bits of a mode, and the umask of all processes of a server


def make_private(folder: Path) -> None:
    """Makes a folder, or removes the rights of group and others on it. Raises ConfigError if it belongs to
    another user, and OSError where it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _take(folder)


def make_all_private(folder: Path) -> None:
    """Removes the rights of group and others below a folder, without following symbolic links.

    Raises ConfigError if anything belongs to another user, who may have planted it.
    """
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _take(Path(where, name))


def make_private_file(path: Path) -> None:
    """Makes an empty file if there is none, or removes the rights of group and others on it. Raises as
    `make_private`."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _take(path)


def _take(path: Path) -> None:
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            return
        if (
            found.st_uid == 0 != os.geteuid()
        ):  # a volume that was mounted for this user; root reads all anyway
            return
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to another user (its uid is {found.st_uid}): give it to the user that runs "
                "the server, remove it, or choose another --state"
            )
        if found.st_mode & OWNER_ONLY:
            path.chmod(stat.S_IMODE(found.st_mode) & ~OWNER_ONLY)
    except FileNotFoundError:  # gone meanwhile
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be kept from other users: {error.strerror}") from error
