"""An executor in a process of its own, over sockets: the same plans, results and commands as bytes."""

import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import torch
from transformers import AutoConfig

from coserve.adapters.text_part import made_of
from coserve.config import EngineConfig
from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import EngineLost, error_named
from coserve.executors.channel import (
    AGAIN,
    AS_IT_IS,
    COMMAND,
    FAILED,
    NARROWER,
    NUMBER,
    PAUSES,
    PLAN,
    ExecutorOpened,
    ExecutorStart,
)
from coserve.executors.codec import Codec
from coserve.executors.executor import Command, ExecutorSpec, R, ReadMemory
from coserve.executors.parameters import RemoteParameters, ShapedPlacement
from coserve.executors.transport import WorkerTransport
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.wire.frames import FrameReader, send_frame
from coserve.wire.plans import decode_result, encode_plan

_BESIDE: Final = 4  # concurrent calls beside steps; more wait
_ENDING: Final = 5.0  # seconds for the process to end by itself
_AHEAD: Final = 16384  # bytes of a plan that surely fit into a socket while the process still runs one
_QUIET: Final = 0.25  # seconds between checks for heartbeats


def start_process(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Starts a process that serves an executor on sockets with these descriptors."""
    return subprocess.Popen(
        [sys.executable, "-m", "coserve.worker.service", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=2,  # to stderr, as libraries print to it
    )


class RemoteExecutor(WorkerTransport):
    """The transport to a worker in another process of this machine.

    Except for `pause_training` and commands beside steps, only one thread at a time may call it. Raises
    EngineLost as soon as the process has ended.
    """

    def __init__(self, model: str, config: EngineConfig, tokenizer: str | None = None) -> None:
        """Starts the process and waits until it has loaded the model in folder `model`. Raises the errors of
        loading."""
        super().__init__(self._receive)
        pairs = [socket.socketpair() for _ in range(2 + _BESIDE)]
        theirs = [other for _, other in pairs]
        descriptors = [sock.fileno() for sock in theirs]
        self.process = start_process(descriptors)
        for sock in theirs:
            sock.close()
        self._steps, self._signals, *beside = (own for own, _ in pairs)
        self._close = weakref.finalize(self, _end, self.process, [own for own, _ in pairs])
        self._beside: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for sock in beside:
            self._beside.put(sock)
        self._messages = FrameReader(self._steps, patience=_QUIET)
        self._poll = select.poll()
        self._poll.register(self._steps, select.POLLIN)
        self._pausing = threading.Lock()
        self._pauses = self._withdrawn = 0
        self._on_progress: Callable[[], object] = int  # nothing
        opened = self._open(ExecutorStart(model, config, torch.get_num_threads(), tokenizer))
        self._spec = opened
        self.base = _without_weights(model, config, opened)
        self.base.frozen = RemoteParameters(self, self.base.frozen)
        self._codec = Codec(self.base, self.base.dtype, torch.device("cpu"))

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return self._spec

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        with self._pausing:
            pauses = PAUSES.pack(self._pauses, self._withdrawn)
        message = PLAN + pauses + encode_plan(plan)
        if len(message) > _AHEAD:  # as in `call`; a process that is stuck does nothing but receive
            self._end_plans(waits=False)
        self._signs()  # drops heartbeats of earlier plans
        with self._lost():
            send_frame(self._steps, message)
        super().launch(plan)

    def call(self, command: Command[R]) -> R:
        """See `Executor`."""
        message = self._codec.encode_command(command)
        if command.beside:
            reply = self._call_beside(message)
        else:  # after all results: two ends that both send more than a socket holds would deadlock
            self._end_plans(waits=not isinstance(command, ReadMemory))
            with self._lost():
                send_frame(self._steps, COMMAND + message)
            reply = self._next()[1:]
        found: R = self._codec.decode_reply(reply, command.reply)
        return found

    def pause_training(self) -> None:
        """See `Executor`."""
        with self._pausing:
            if self._pauses == self._withdrawn:  # else it is asked for already
                self._pauses += 1
                with self._lost():
                    self._signals.sendall(NUMBER.pack(self._pauses))

    def resume_training(self) -> None:
        """See `Executor`. Sent with the next plan."""
        with self._pausing:
            self._withdrawn = self._pauses

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self._on_progress = beat

    def close(self) -> None:
        """Ends the process."""
        self._close()

    # Inside

    def _open(self, start: ExecutorStart) -> ExecutorSpec:
        with self._lost():
            send_frame(self._steps, msgspec.msgpack.encode(start))
        opened = msgspec.msgpack.decode(self._next(), type=ExecutorOpened)
        if opened.fault is not None:
            self.close()
            raise error_named(*opened.fault)
        assert opened.spec is not None, "what is opened has a spec"
        return opened.spec

    def _call_beside(self, message: bytes) -> bytes:
        sock = self._beside.get()
        try:
            with self._lost():
                send_frame(sock, message)
                reply = FrameReader(sock).read()
        finally:
            self._beside.put(sock)
        if reply is None:
            raise self._gone()
        return reply

    def _repeat(self, narrower: bool) -> None:
        super()._repeat(narrower)
        with self._lost():
            send_frame(self._steps, AGAIN + (NARROWER if narrower else AS_IT_IS))

    def _receive(self, plan: BasePlan) -> BaseResult:
        """Waits for a plan's result. Raises PassFailed."""
        message = self._next()
        if message[:1] == FAILED:
            raise error_named(*msgspec.msgpack.decode(message[1:], type=tuple[str, str]))
        return decode_result(message[1:])

    def _next(self) -> bytes:
        """Waits for the next message; reports heartbeats meanwhile."""
        while True:
            try:
                with self._lost():
                    message = self._messages.read()
            except TimeoutError:
                if self._signs():
                    self._on_progress()
                continue
            if message is None:
                raise self._gone()
            return message

    def _signs(self) -> bool:
        """Tells whether a heartbeat of the process has come since the last call."""
        try:
            return bool(self._signals.recv(4096, socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _is_there(self) -> bool:
        return self._messages.has_begun or bool(self._poll.poll(0))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> EngineLost:
        try:
            status = self.process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return EngineLost("the executor's process closed its sockets")
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return EngineLost(f"the executor's process has ended ({how})")


def _without_weights(model: str, config: EngineConfig, spec: ExecutorSpec) -> Base:
    """The model's base without data, for the host's estimates and checks."""
    loaded = AutoConfig.from_pretrained(model, trust_remote_code=False)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    with fake_tensors():
        shapes = made_of(loaded, dtype=dtype)
        base = load_base(shapes, dtype, "cpu", config.quantize)
        for path in spec.elsewhere:
            base.linears[path].placement = ShapedPlacement(base.linears[path].placement)
    base.fingerprint, base.parameters = spec.fingerprint, spec.parameters
    base.row_buckets, base.sites = spec.row_buckets, {site.path: site for site in spec.sites}
    return base


def _end(process: "subprocess.Popen[bytes]", sockets: Sequence[socket.socket]) -> None:
    """Closes the sockets, which ends the process; a process that does not end is killed."""
    for sock in sockets:
        sock.close()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
