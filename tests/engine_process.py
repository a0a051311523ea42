"""A real engine's process, and a server's end of its socket, for tests."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from coserve.config import EngineConfig
from coserve.core.request import Request, SamplingParams
from coserve.wire.codec import decode_answer, encode_commands
from coserve.wire.control import EngineStart, Status, decode_line, encode_line
from coserve.wire.messages import (
    Acknowledge,
    Command,
    EngineStats,
    Hello,
    JobEnded,
    JobNews,
    Report,
    Token,
)
from forking import forked

_PATIENCE = 180.0  # seconds; only a hang takes so long


class EngineProcess:
    """Started at once; `launch` gives it its model, `kill` is `kill -9`."""

    def __init__(self, folder: Path, is_forked: bool = True, **engine: Any) -> None:
        """`is_forked`: the imports are done (`forking.py`); else it is started as servers start it."""
        self.socket = folder / "engine.sock"
        executor = os.environ.get("COSERVE_ENGINE_EXECUTOR", "local")
        defaults = {"calibrate": False, "cache_tokens": 2048, "page_size": 8, "executor": executor}
        self._engine = {**defaults, **engine}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "coserve.wire.launch", "coserve.engine.process"]
        with forked() if is_forked else nullcontext():
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def phase(self) -> Status:
        """The next phase it reaches."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"the engine ended with status {self.process.wait()}"
            status = decode_line(line, Status)
            if status.state != "alive":
                return status

    def launch(self, model: Path, **fields: Any) -> "Server":
        """Loads the model, and connects."""
        self.feed(model, **fields)
        assert [self.phase().state for _ in range(3)] == ["standby", "loading", "ready"]
        return Server(self.socket)

    def feed(self, model: Path, **fields: Any) -> None:
        assert self.process.stdin is not None
        start = EngineStart(str(model), str(self.socket), EngineConfig(threads=1, **self._engine), **fields)
        self.process.stdin.write(encode_line(start).encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Server:
    """A server's knowledge: tokens by request, job events in order, the last statistics."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(_PATIENCE)
        self.socket.connect(str(path))
        self._stream = self.socket.makefile("rb")
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Token] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.news: list[JobNews] = []
        self.numbers: list[int] = []
        self.replies: dict[int, Any] = {}
        self.stats: EngineStats | None = None
        self.drained = False
        hello = self._receive()
        assert isinstance(hello, Hello)
        self.hello = hello

    def send(self, *commands: Command) -> None:
        body = encode_commands(commands)
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def submit(self, name: str, prompt: list[int], continued: tuple[int, ...] = (), **sampling: Any) -> None:
        params = SamplingParams(**{"seed": 1, "ignore_eos": True, **sampling})
        self.send(Request(name, tuple(prompt), params, continued=continued))

    def until(self, done: Callable[["Server"], object]) -> "Server":
        """Reads reports until `done`."""
        end = time.monotonic() + _PATIENCE
        while not done(self):
            assert time.monotonic() < end, "the engine does not get there"
            self.read()
        return self

    def finished(self, *names: str) -> "Server":
        """Reads reports until these answers have ended."""
        return self.until(lambda s: all(s.is_over(name) for name in names))

    def is_over(self, name: str) -> bool:
        token = self.last.get(name)
        return token is not None and (token.finish is not None or token.fault is not None)

    def ended(self, job: str) -> JobEnded:
        """Reads reports until a job has ended."""
        ended: JobEnded = self.until(lambda s: s.of(JobEnded, job)).of(JobEnded, job)[-1]
        return ended

    def of(self, kind: type, job: str | None = None) -> list[Any]:
        """Job news of one kind, of all jobs or one."""
        return [news for news in self.news if isinstance(news, kind) and job in (None, news.job)]

    def acknowledge(self) -> None:
        self.send(Acknowledge(self.numbers[-1]))

    def read(self) -> Report:
        report = self._receive()
        assert isinstance(report, Report)
        self.drained = report.drained
        for token in report.tokens:
            self.last[token.id] = token
            if token.token is not None:
                self.tokens.setdefault(token.id, []).append(token.token)
            self.prompt_logprobs.setdefault(token.id, []).extend(p.chosen for p in token.prompt_logprobs)
        for numbered in report.jobs:
            self.news.append(numbered.news)
            self.numbers.append(numbered.number)
        self.replies.update({reply.ref: reply for reply in report.replies})
        self.stats = report.stats or self.stats
        return report

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self._stream.close()
        self.socket.close()

    def _receive(self) -> Hello | Report:
        header = self._stream.read(4)
        if len(header) < 4:
            raise EOFError("the engine closed the connection")
        return decode_answer(self._stream.read(struct.unpack(">I", header)[0]))
