"""Ways of weights from files to the device: on a CPU in one move, on a GPU through pinned host memory.

What leaves a GPU may stay in host memory for a while, so that it need not be read again. Which versions do is
the adapter cache's business (`cache.py`). The GPU's way is written and has not been run on one.
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
    """Lets a thread work a fifth of the time, a millisecond at once: steps that all take a little longer are
    better than one that takes much longer."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        worked = time.thread_time() - self._since
        if worked > _PIECE:
            time.sleep(min(worked, 10 * _PIECE) * _REST)
            self._since = time.thread_time()


class HostCopies:
    """Copies of stored versions in host memory, from which they come to the device. `room` are the bytes
    they may have; where it is 0, as on a CPU, whose memory is the host's, there are none."""

    def __init__(self, read: Read, room: int = 0, pin: Move = lambda v: v, move: Move = lambda v: v) -> None:
        """`read` reads a version's files, `pin` gives a copy on the host, `move` one on the device."""
        self.room = room
        self._read, self._pin, self._move = read, pin, move
        self._copies: dict[str, AdapterVersion] = {}  # by key

    def load(self, stored: StoredVersion) -> AdapterVersion:
        """The weights on the device. Raises what `StoredVersion.read` does."""
        copy = self._copies.get(stored.key)
        if copy is None:
            copy = self._pin(self._read(stored))
            if self.room:
                self._copies[stored.key] = copy
        return self._move(copy)

    def drop(self, keys: Iterable[str]) -> None:
        """Frees copies; keys of versions without one are ignored."""
        for key in keys:
            self._copies.pop(key, None)


def host_copies(frame: Frame, dtype: torch.dtype, device: torch.device) -> HostCopies:
    """Host copies for a device, with room for a quarter of what the host has free. The thread that loads
    waits for a stream of its own: whoever computes does not."""
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
