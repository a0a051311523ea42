"""The bench's processes: base executors, clients and peers, and how much memory they hold."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Final, Self, TypeVar

import msgspec
import psutil

from coserve.errors import ServerError
from coserve.split.address import Address
from coserve_benchmarks.split.orders import ClientOrder, Ready, RoundOrder, RoundReport, Work

T = TypeVar("T")
_COSERVE: Final = (sys.executable, "-c", "from coserve.cli.app import main; main()")
_LOOKS: Final = 0.1  # seconds between two looks at memory
_STARTING: Final = 300.0  # seconds that an executor has to load
_STOPPING: Final = 20.0  # seconds that a process has to end by itself


class Executor:
    """`coserve executor` as a process of its own, which may be stopped and started in another mode."""

    def __init__(self, folder: str, address: str, dtype: str, threads: int) -> None:
        self.address = address
        self._command = [*_COSERVE, "executor", folder, "--listen", address]
        self._command += ["--dtype", dtype]
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as its process)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def start(self, *options: str) -> None:
        """Starts it, and waits until it listens. Raises ServerError."""
        self._process = subprocess.Popen(
            [*self._command, *options],
            stdout=self._log,
            stderr=self._log,
            text=True,
            env=_threads(self._threads),
        )

        until = time.monotonic() + _STARTING
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                raise self._failed()
            time.sleep(_LOOKS)

    def stop(self) -> None:
        """Ends it. Raises ServerError where it had ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise self._failed()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOPPING)
            return
        process.kill()
        process.wait()

    def _listens(self) -> bool:
        try:
            Address.parse(self.address).connect().close()
        except OSError:
            return False
        return True

    def _failed(self) -> ServerError:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        self._log.seek(0)
        return ServerError(f"an executor ended with {process.wait()}: {self._log.read()[-500:]}")


class Clients:
    """Processes that work in rounds, together or some of them."""

    def __init__(self, orders: Sequence[ClientOrder]) -> None:
        """Starts them one after the other: loading many models at once takes memory that no round does.
        Raises ServerError."""
        self._clients: list[_Client] = []
        try:
            for order in orders:
                self._clients.append(_Client(order))
                self._clients[-1].wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [client.pid for client in self._clients]

    def run(self, work: Work, seconds: float, first: int | None = None) -> list[RoundReport]:
        """One round of all, or of the first so many, at once."""
        return self.begin(work, seconds, first)()

    def begin(self, work: Work, seconds: float, first: int | None = None) -> Callable[[], list[RoundReport]]:
        """Begins a round; what it returns waits for its end."""
        chosen = self._clients[:first]
        for client in chosen:
            client.begin(RoundOrder(work, seconds))
        return lambda: [client.report() for client in chosen]

    def close(self) -> None:
        """Ends them."""
        for client in self._clients:
            client.close()


class _Client:
    def __init__(self, order: ClientOrder) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as its process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coserve_benchmarks.split.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_threads(order.threads),
        )
        self.pid = self._process.pid
        self._write(order)

    def wait_ready(self) -> None:
        self._read(Ready)

    def begin(self, order: RoundOrder) -> None:
        self._write(order)

    def report(self) -> RoundReport:
        return self._read(RoundReport)

    def close(self) -> None:
        """Ends it: a script ends with its input, whatever it waits for is not waited for."""
        with suppress(OSError):
            self._stream(self._process.stdin).close()
        try:
            self._process.wait(_STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: ClientOrder | RoundOrder) -> None:
        stream = self._stream(self._process.stdin)
        with suppress(BrokenPipeError):  # its report is missing then
            stream.write(msgspec.json.encode(message).decode() + "\n")
            stream.flush()

    def _read(self, kind: type[T]) -> T:
        line = self._stream(self._process.stdout).readline()
        if not line:
            self._log.seek(0)
            told = " ".join(self._log.read().strip().splitlines()[-3:])
            raise ServerError(f"a client ended with {self._process.wait()}: {told}")
        return msgspec.json.decode(line, type=kind)

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None, "all are pipes"
        return stream


class PeakMemory(threading.Thread):
    """Notes the most memory that processes hold together: the sum of their proportional set sizes, in which
    a page that n processes share counts a n-th for each."""

    def __init__(self, pids: Collection[int]) -> None:
        super().__init__(daemon=True)
        self._processes = [psutil.Process(pid) for pid in pids]
        self._ended = threading.Event()
        self.nbytes = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, sum(one.memory_full_info().pss for one in self._processes))
            if self._ended.wait(_LOOKS):
                return


def _threads(count: int) -> Mapping[str, str]:
    """The environment of a process with so many threads, which do not spin while they wait."""
    return {**os.environ, "OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "passive"}
