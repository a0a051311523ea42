"""Executors' processes that begin within milliseconds: forked from one that has imported everything.

A start of `coserve.executors.service` by itself imports for seconds, which a suite of hundreds of engines
cannot afford. What runs in the process is the same.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from coserve.config import EngineConfig
from coserve.executors.opening import Model, Opened, open_remote
from coserve.executors.remote import RemoteExecutor

_ZYGOTE = """
import os, socket, sys
from coserve.executors import service
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, descriptors, _, _ = socket.recv_fds(listener, 1, 64)
    if not message:
        os._exit(0)
    pid = os.fork()
    if not pid:
        listener.close()
        try:
            service.main(descriptors)
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    listener.send(pid.to_bytes(8, "big"))
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            break
"""


class Forked:
    """A process that was forked elsewhere: whether it is there is all that can be told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it is there."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return 0 if file.read().rpartition(")")[2].split()[0] == "Z" else None
        except OSError:
            return 0

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended."""
        end = time.monotonic() + (60.0 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("executor", timeout or 0.0)
            time.sleep(0.002)
        return 0

    def kill(self) -> None:
        """Ends it at once."""
        os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """The process that the others are forked from; started when the first one is wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def fork(self, descriptors: Sequence[int]) -> Forked:
        """See `remote.start_process`."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair()
                command = [sys.executable, "-c", _ZYGOTE, str(theirs.fileno())]
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
                theirs.close()
            socket.send_fds(self._socket, [b"f"], list(descriptors))
            return Forked(int.from_bytes(self._socket.recv(8), "big"))


ZYGOTE = Zygote()


def fork_executors(patch: pytest.MonkeyPatch) -> None:
    """Has executors' processes begin by a fork."""
    patch.setattr("coserve.executors.remote.start_process", ZYGOTE.fork)


def compute_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Has every engine compute in a process of its own. A test that looks into an executor is skipped: what
    it looks at is not in this process."""
    fork_executors(patch)

    def is_elsewhere(executor: RemoteExecutor, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"looks at the executor's {name}, which is in another process")

    patch.setattr(RemoteExecutor, "__getattr__", is_elsewhere, raising=False)

    def opened(model: Model, config: EngineConfig, read_tokenizer: Callable[[], Any]) -> Opened:
        if isinstance(model, PreTrainedModel) and model.dtype == torch.float64:
            pytest.skip("a model that comes from a folder has its rotary tables in float32")
        return open_remote(model, config, read_tokenizer)

    patch.setattr("coserve.engine.engine.open_executor", opened)
