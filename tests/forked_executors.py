"""Executors' processes that begin within milliseconds: forked from one that has imported everything.

A start of `coserve.worker.service` by itself imports for seconds, which a suite of hundreds of engines
cannot afford. What runs in the process is the same.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from coserve.executors.local import LocalExecutor
from coserve.executors.remote import RemoteExecutor
from coserve.model import load
from coserve.worker.opening import open_remote
from models import MIXTURES, Exact

_ZYGOTE = """
import os, socket, sys
import forked_executors
from coserve.worker import service
forked_executors.compute_as_tests_do(int(sys.argv[2]))
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


def compute_as_tests_do(shared: int) -> None:
    """In executors' processes: float64 models are float64 throughout, as the tests' own are, whereas those of
    a folder have their rotary tables in float32 and fused experts, whose products have no float64. And plans
    and commands run under `Exact` while it holds in the tests' process, which byte 0 of `shared` tells."""
    is_exact = mmap.mmap(shared, mmap.PAGESIZE)
    plain = load.load_model

    def loaded(model: str | Path, dtype: torch.dtype | str) -> PreTrainedModel:
        made = plain(model, dtype)
        if made.dtype != torch.float64:
            return made
        if made.config.model_type in MIXTURES:
            made.set_experts_implementation("eager")
        return made.to(torch.float64)

    def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            with Exact() if is_exact[0] else nullcontext():
                return function(*args, **named)

        return run

    load.load_model = loaded
    for name in ("collect", "call"):  # a plan runs where its result is collected
        setattr(LocalExecutor, name, exactly(getattr(LocalExecutor, name)))


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
        self._shared = os.memfd_create("tests")
        os.ftruncate(self._shared, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._shared, mmap.PAGESIZE)

    def note_exact(self, change: int) -> None:
        """Tells the processes that one more `Exact`, or one less, holds in this one."""
        self._memory[0] += change

    def fork(self, descriptors: Sequence[int]) -> Forked:
        """See `remote.start_process`."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair()
                passed = [theirs.fileno(), self._shared]
                paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
                command = [sys.executable, "-c", _ZYGOTE, *map(str, passed)]
                subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=paths)
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

    def enter(mode: Exact) -> Exact:
        ZYGOTE.note_exact(1)
        return plain_enter(mode)

    def leave(mode: Exact, *fault: Any) -> None:
        plain_exit(mode, *fault)
        ZYGOTE.note_exact(-1)

    plain_enter, plain_exit = Exact.__enter__, Exact.__exit__
    patch.setattr(Exact, "__enter__", enter)
    patch.setattr(Exact, "__exit__", leave)
    patch.setattr(RemoteExecutor, "__getattr__", is_elsewhere, raising=False)
    patch.setattr("coserve.engine.engine.open_executor", open_remote)
