"""An executor's own process: plans and commands in, results and replies out.

`RemoteExecutor` starts it with its ends of the sockets (`channel`). It ends when its host closes them or
ends.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from coserve.core.contained import contained
from coserve.core.plan import BasePlan
from coserve.errors import CoserveError, OutOfMemory, PassFailed
from coserve.executors.channel import (
    AGAIN,
    ALIVE,
    ASKED,
    ENDED,
    FAILED,
    NARROWER,
    NUMBER,
    PAUSES,
    PLAN,
    REPLY,
    RESULT,
    WAITS,
    WORKS,
    ExecutorOpened,
    ExecutorStart,
)
from coserve.executors.codec import Codec
from coserve.executors.executor import Command, DeviceWorker
from coserve.executors.local import LocalExecutor
from coserve.memory.exhausted import contain_nothing, is_out_of_memory, words_of
from coserve.model.base import Base
from coserve.parallel.ranks import RankGrid, join
from coserve.text.tokenizer import load_tokenizer
from coserve.wire.frames import FrameReader, send_frame
from coserve.wire.plans import decode_plan, drawn_of, encode_result
from coserve.worker.opening import open_local

_ALIVE_EVERY: Final = 0.25  # seconds, while a step runs
_ORPHANED: Final = 3  # exit status


class Pauses:
    """Orders pauses, which come on one socket, and plans that withdraw them, which come on another: a pause
    that arrives after its withdrawal is ignored."""

    def __init__(self, worker: DeviceWorker) -> None:
        self._worker, self._lock = worker, threading.Lock()
        self._withdrawn = 0

    def ask(self, number: int) -> None:
        """Applies the host's pause of this number."""
        with self._lock:
            if number > self._withdrawn:
                self._worker.pause_training()

    def withdraw(self, number: int) -> None:
        """Withdraws pauses up to this number, as a plan begins; later ones stay."""
        with self._lock:
            if number > self._withdrawn:
                self._withdrawn = number
                self._worker.resume_training()


class Service:
    """One worker behind its sockets. Of the results of one that `follows`, as a further rank of several that
    compute the same, only a digest is sent."""

    def __init__(
        self, base: Base, worker: DeviceWorker, steps: socket.socket, signals: socket.socket, follows: bool
    ) -> None:
        self._worker, self._steps, self._signals = worker, steps, signals
        self._codec = Codec(base.frame, base.dtype, base.device)
        self._pauses, self._ranks, self._follows = Pauses(worker), base.shards.every, follows
        self._alive = 0.0  # time of the last heartbeat
        self._waiting = deque[BasePlan]()  # plans without a result
        self._has_failed = False  # a pass of the oldest of these has, and the host has not asked for it again
        worker.on_progress(self._tell_alive)

    def run(self, beside: Sequence[socket.socket]) -> None:
        """Serves until the host closes the steps' socket."""
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        threads, ready = torch.get_num_threads(), threading.Barrier(len(beside) + 1)
        for sock in beside:
            threading.Thread(target=self._answer_beside, args=(sock, ready), daemon=True).start()
        ready.wait()
        torch.set_num_threads(threads)  # a thread's own number is MKL's for the whole process
        steps = FrameReader(self._steps)
        while (message := steps.read()) is not None:
            kind, body = message[:1], message[1:]
            if kind == PLAN:
                asked, withdrawn = PAUSES.unpack(body[: PAUSES.size])
                self._pauses.withdraw(withdrawn)
                self._pauses.ask(asked)  # the signal itself may come later than the plan
                self._waiting.append(decode_plan(body[PAUSES.size :]))
                if not self._has_failed:
                    self._run()
            elif kind == AGAIN:
                if body == NARROWER:
                    self._waiting[0] = self._waiting[0].narrower
                self._run()
            else:
                send_frame(self._steps, REPLY + self._reply(body))

    def _run(self) -> None:
        """Runs all plans that wait, up to one of which a pass fails."""
        self._has_failed = False
        while self._waiting and not self._has_failed:
            try:
                result = self._worker.run(self._waiting[0])
            except PassFailed as error:
                if self._ranks.count > 1:  # the others wait for this one within the pass
                    raise
                self._has_failed = True
                fault = type(error).__name__, str(error)
                send_frame(self._steps, FAILED + msgspec.msgpack.encode(fault))
            else:
                self._waiting.popleft()
                body = b"" if self._follows else encode_result(result)
                send_frame(self._steps, RESULT + drawn_of(result) + body)

    def _reply(self, body: bytes) -> bytes:
        """The reply to a command, or any error that it raises: a panic of a Rust library is no `Exception`,
        and would end the thread and leave the caller waiting."""
        try:
            command: Command[Any] = self._codec.decode_command(body)
            return self._codec.encode_reply(self._worker.call(command))
        except BaseException as error:
            if is_out_of_memory(error):
                return self._codec.encode_fault(OutOfMemory("there was no memory for it"))
            return self._codec.encode_fault(contained(error, "a command of the executor"))

    def _answer_beside(self, sock: socket.socket, ready: threading.Barrier) -> None:
        """Answers commands beside steps, on a thread that limits torch to one."""
        torch.set_num_threads(1)
        ready.wait()
        messages = FrameReader(sock)
        while (message := messages.read()) is not None:
            send_frame(sock, self._reply(message))

    def _watch(self) -> None:
        """Receives pauses; ends the process with its host, even during a long step."""
        with suppress(ConnectionError):  # the host was killed
            while head := self._signals.recv(NUMBER.size, socket.MSG_WAITALL):
                if len(head) < NUMBER.size:
                    continue
                if (number := NUMBER.unpack(head)[0]) == ASKED:
                    self._tell(WAITS if self._ranks.is_waiting else WORKS)
                else:
                    self._pauses.ask(number)
        os._exit(_ORPHANED)

    def _tell_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive >= _ALIVE_EVERY:
            self._alive = now
            self._tell(ALIVE)

    def _tell(self, sign: bytes) -> None:
        with suppress(OSError):  # the host does not read yet, or is gone
            self._signals.send(sign, socket.MSG_DONTWAIT)


def main(descriptors: Sequence[int]) -> None:
    """Opens the model of the first message, and serves it on the sockets of these descriptors."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the host to handle
        signal.signal(number, signal.SIG_IGN)
    steps, signals, *beside = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    transformers_logging.disable_progress_bar()
    with suppress(OSError):
        signals.send(ALIVE)  # imports are done
    first = FrameReader(steps).read()
    if first is None:
        return
    start = msgspec.msgpack.decode(first, type=ExecutorStart)
    try:
        _serve(start, steps, signals, beside)
    except Exception as error:  # of which the other ranks only learn that this one is gone
        if start.rank.count > 1:
            with suppress(OSError):
                why = f"{type(error).__name__}: {words_of(error)}"
                is_crash = not isinstance(error, PassFailed)  # a file's fault is no work's
                told = time.monotonic(), why, is_crash
                send_frame(steps, ENDED + msgspec.msgpack.encode(told))
        raise


def run(arguments: Sequence[str]) -> None:
    """Is the whole of the process, whose descriptors are given as text."""
    status = 1
    try:
        main([*map(int, arguments)])
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # does not wait for a stream's thread


def _serve(
    start: ExecutorStart, steps: socket.socket, signals: socket.socket, beside: Sequence[socket.socket]
) -> None:
    torch.set_num_threads(start.threads)
    config = start.config
    if start.rank.count > 1:
        contain_nothing()
        if torch.device(config.device).type == "cuda":
            config = replace(config, device=f"cuda:{start.rank.number}")
    ranks = join(start.rank, torch.device(config.device), ordered=config.deterministic)
    try:
        folder = start.tokenizer
        opened = open_local(
            start.model,
            config,
            lambda: None if folder is None else load_tokenizer(folder),
            RankGrid.of(ranks, config.pipeline_parallel),
        )
    except CoserveError as error:
        fault = ExecutorOpened(fault=(type(error).__name__, str(error)))
        with suppress(OSError):  # another rank's fault came first, and the host has ended
            send_frame(steps, msgspec.msgpack.encode(fault))
        return
    send_frame(steps, msgspec.msgpack.encode(ExecutorOpened(opened.executor.spec)))
    assert isinstance(opened.executor, LocalExecutor), "it was opened in this process"
    follows = start.rank.number % config.tensor_parallel > 0
    Service(opened.base, opened.executor.worker, steps, signals, follows).run(beside)


if __name__ == "__main__":
    run(sys.argv[1:])
