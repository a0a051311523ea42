"""One server per state folder: a lock that the system releases when its holder dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from coserve.errors import ConfigError, StateInUse
from coserve.serve.store.private import make_all_private, make_private

_ATTEMPTS, _PAUSE = 10, 0.02  # to take the lock; seconds between two of them


class Running(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holder of a state folder; `url` is empty until its server listens.

    `api`, `engine` and `standby` are the process ids of its ready children, for monitoring and tests; 0 where
    there is none. `deaths` counts children that ended since its start, and were replaced, by their names.
    """

    pid: int
    url: str = ""
    api: int = 0
    engine: int = 0
    standby: int = 0
    deaths: dict[str, int] = {}


class Claim:
    """A held state folder."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def note(self, running: Running) -> None:
        """Records the holder of the folder, for the error of another server and for `find_running`.

        On a full disk nothing is written; the error then lacks these details.
        """
        data = msgspec.json.encode(running) + b"\n"
        with suppress(OSError):
            os.pwrite(self._descriptor, data, 0)  # a concurrent reader finds two lines, and reads the first
            os.ftruncate(self._descriptor, len(data))


@contextmanager
def claim_state(state: Path) -> Iterator[Claim]:
    """Creates and locks the folder, and removes other users' rights to its contents.

    Raises StateInUse, with the holder's process id, where another server holds it, and ConfigError where the
    folder cannot be created or written to, or a file in it belongs to another user.
    """
    try:
        make_private(state)
        # Never removed: a lock on a file that somebody unlinks protects nothing.
        descriptor = os.open(_lock_file(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state folder {state} cannot be used: {error.strerror}") from error
    try:
        if not _lock_patiently(descriptor):
            holder = _read(_lock_file(state))
            whose = f"process {holder.pid}" if holder else "another process"
            raise StateInUse(f"{whose} serves from {state} already: stop it, or choose another --state")
        make_all_private(state)
        claim = Claim(descriptor)
        claim.note(Running(os.getpid()))
        yield claim
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def find_running(state: Path) -> Running | None:
    """The server that holds a state folder, None if there is none."""
    path = _lock_file(state)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _lock(descriptor) else _read(path)
    finally:
        os.close(descriptor)


def _lock_file(state: Path) -> Path:
    return state / "server.lock"


def _lock_patiently(descriptor: int) -> bool:
    """Locks with retries, as `find_running` takes the lock briefly to test it."""
    for _ in range(_ATTEMPTS):
        if _lock(descriptor):
            return True
        time.sleep(_PAUSE)
    return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> Running | None:
    try:
        return msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=Running)
    except (OSError, msgspec.DecodeError):
        return None
