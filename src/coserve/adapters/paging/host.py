"""Moves weights from files to the device: on a CPU directly, on a GPU through pinned host memory.

Versions evicted from a GPU may stay in host memory, as the adapter cache (`cache.py`) decides. The GPU's way
is written and has not been run on one.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.buffer import Buffer
from coserve.adapters.paging.reader import Read
from coserve.adapters.paging.stored import StoredVersion
from coserve.adapters.sites import Frame
from coserve.memory.budget import process_capacity

_PIECE: Final = 1e-3  # seconds of work
_REST: Final = 4.0  # times as much
_SHARE: Final = 0.25  # of the host's free memory that adapters of a GPU may have there

Move = Callable[[AdapterVersion], AdapterVersion]


class Pace:
    """Throttles a thread to a fifth of the time, a millisecond at a time: many slightly longer steps are
    better than one much longer one."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        worked = time.thread_time() - self._since
        if worked > _PIECE:
            time.sleep(min(worked, 10 * _PIECE) * _REST)
            self._since = time.thread_time()


class HostCopies:
    """Copies of stored versions in host memory, the source of loads to the device. `room` is their limit in
    bytes; 0, as on a CPU, makes no copies."""

    def __init__(self, read: Read, room: int = 0, pin: Move = lambda v: v, move: Move = lambda v: v) -> None:
        """`read` reads a version's files, `pin` copies to pinned host memory, `move` to the device."""
        self.room = room
        self._read, self._pin, self._move = read, pin, move
        self._copies: dict[str, AdapterVersion] = {}  # by key

    def load(self, stored: StoredVersion) -> AdapterVersion:
        """Loads a version to the device. Raises what `StoredVersion.read` does."""
        copy = self._copies.get(stored.key)
        if copy is None:
            copy = self._pin(self._read(stored))
            if self.room:
                self._copies[stored.key] = copy
        return self._move(copy)

    def drop(self, keys: Iterable[str]) -> None:
        """Frees copies; other keys are ignored."""
        for key in keys:
            self._copies.pop(key, None)


def host_copies(frame: Frame, dtype: torch.dtype, device: torch.device) -> HostCopies:
    """Host copies for a device, with room for a quarter of the host's free memory. Loads use a stream of
    their own, on which only the loading thread waits."""
    buffer, pace = Buffer(), Pace()
    has_own_memory = device.type == "cuda"
    read_to = torch.device("cpu") if has_own_memory else device

    def read(stored: StoredVersion) -> AdapterVersion:
        return stored.read(frame, dtype, read_to, buffer, pace)

    if not has_own_memory:
        return HostCopies(read)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(version: AdapterVersion) -> AdapterVersion:
        return version.with_parameters({n: t.pin_memory() for n, t in version.parameters().items()})

    def move(version: AdapterVersion) -> AdapterVersion:
        with torch.cuda.stream(stream):
            moved = {n: t.to(device, non_blocking=True) for n, t in version.parameters().items()}
        stream.synchronize()
        return version.with_parameters(moved)

    return HostCopies(read, int(_SHARE * process_capacity().free), pin, move)
