"""Ways of weights from files to the device: on a CPU in one move, on a GPU through pinned host memory.

What leaves a GPU stays in host memory for a while, up to a number of bytes, so that it need not be read
again. The GPU's way is written and has not been run on one.
"""

import time
from collections import OrderedDict
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


def reads_for(frame: Frame, dtype: torch.dtype, device: torch.device) -> Read:
    """Chooses how weights are read onto a device."""
    if device.type != "cuda":
        buffer, pace = Buffer(), Pace()
        return lambda stored: stored.read(frame, dtype, device, buffer, pace)
    return ByHost(frame, dtype, device, int(_SHARE * process_capacity().free))


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


class ByHost:
    """Files to pinned host memory, and from there by a stream of its own. Runs on one thread, which waits for
    the copy: whoever computes does not."""

    def __init__(self, frame: Frame, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self._frame, self._dtype, self._device, self._limit = frame, dtype, device, limit
        self._host: OrderedDict[str, AdapterVersion] = OrderedDict()  # the latest used last
        self._held = 0  # bytes there
        self._buffer, self._pace = Buffer(), Pace()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, stored: StoredVersion) -> AdapterVersion:
        host = self._on_host(stored)
        with torch.cuda.stream(self._stream):
            moved = {n: t.to(self._device, non_blocking=True) for n, t in host.parameters().items()}
        self._stream.synchronize()
        return host.with_parameters(moved)

    def _on_host(self, stored: StoredVersion) -> AdapterVersion:
        if stored.key not in self._host:
            read = stored.read(self._frame, self._dtype, torch.device("cpu"), self._buffer, self._pace)
            pinned = {name: tensor.pin_memory() for name, tensor in read.parameters().items()}
            self._host[stored.key] = read.with_parameters(pinned)
            self._held += read.nbytes
        self._host.move_to_end(stored.key)
        while self._held > self._limit and len(self._host) > 1:
            self._held -= self._host.popitem(last=False)[1].nbytes
        return self._host[stored.key]
