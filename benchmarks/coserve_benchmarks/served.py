"""`coserve serve` in processes of its own: started, watched, killed in parts, started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import httpx
import psutil

from coserve.errors import ServerError
from coserve.serve.processes.claim import Running, find_running

_RUN = "from coserve.cli.app import main; main()"
_NAP = 0.01  # seconds between two looks
_LOADED = "coserve_engine_load_seconds "


class Victim(StrEnum):
    """Process that is killed, always with SIGKILL."""

    ENGINE = "engine"
    API = "API"
    EVERYTHING = "everything"


class Served:
    """One server over its state folder, through all its lives. Use it in a `with`: no process survives it.

    `settings` are fields of ServerSettings, and with `engine_` before them of EngineConfig. `patience` bounds
    every wait, in seconds; `environment` is added to this process's. Methods raise ServerError where the
    server does not do what it should.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        patience: float = 120.0,
        environment: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.state = folder / "state"
        self.url, self.name = "", model.name
        self._console = folder / "console"
        self._patience = patience
        self._http = httpx.Client(timeout=10.0, trust_env=False)
        config = folder / "coserve.toml"  # so that nobody else's applies
        config.touch()
        given = {"model": model, "state": self.state, "port": 0, "config": config, **settings}
        foreign = {key: value for key, value in os.environ.items() if not key.startswith("COSERVE_")}
        self._environment = {**foreign, **environment}
        self._environment |= {f"COSERVE_{key.upper()}": _text(value) for key, value in given.items()}

    def __enter__(self) -> "Served":
        try:
            self.start()
        except BaseException:  # `__exit__` is not called for it
            self.kill(Victim.EVERYTHING)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(Victim.EVERYTHING)
        self._http.close()

    # Life

    def start(self) -> None:
        """Starts it, at the address that it had before if it had one, and returns when it is ready."""
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, "serve"],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        self.wait(lambda: self._running() is not None and self.running.url != "", "to listen")
        self.url = self.running.url
        self._environment["COSERVE_PORT"] = self.url.rpartition(":")[2]
        self.wait_ready()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def wait_end(self) -> int:
        """Waits for the end; returns the exit status."""
        try:
            return self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            raise ServerError(f"it did not end within {self._patience:g} s of SIGTERM") from None

    def kill(self, victim: Victim) -> float:
        """`kill -9`, and the moment it happened, by `time.monotonic`."""
        running = self._running()
        if victim is not Victim.EVERYTHING:
            pid = 0 if running is None else running.engine if victim is Victim.ENGINE else running.api
            if not pid:
                raise ServerError(f"there is no {victim} to kill")
            return _kill(pid)
        children = _children(self._process.pid) if self._process.poll() is None else set()
        self._process.kill()
        moment = time.monotonic()
        for pid in children:
            _kill(pid)
        self._process.wait()
        _wait(
            lambda: not any(_is_alive(pid) for pid in children), lambda: "the children to end", self._patience
        )
        return moment

    # What it says

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def running(self) -> Running:
        """The server's processes that are ready now."""
        found = self._running()
        if found is None:
            raise ServerError("the server is not there")
        return found

    @property
    def is_ready(self) -> bool:
        """Tells whether requests would be answered now."""
        try:
            return self._http.get(f"{self.url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def load_seconds(self) -> float:
        """Seconds that the present engine took to load its model and to measure it."""
        text = self._http.get(f"{self.url}/metrics").text
        found = [line.removeprefix(_LOADED) for line in text.splitlines() if line.startswith(_LOADED)]
        if not found:
            raise ServerError(f"/metrics does not tell {_LOADED.strip()}")
        return float(found[0])

    @property
    def processor_seconds(self) -> float:
        """Processor seconds that all processes of the server have used so far."""
        me = psutil.Process(self._process.pid)
        taken = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        return float(sum(times.user + times.system for times in taken))

    def wait_ready(self, without: Collection[int] = ()) -> None:
        """Returns when requests would be answered, by processes that are none of `without`."""

        def is_there() -> bool:
            found = self._running()
            now = set() if found is None else {found.engine, found.api}
            return bool(now) and not now & {0, *without}

        self.wait(lambda: is_there() and self.is_ready, "to be ready")

    def wait_standby(self) -> None:
        """Returns when an engine stands by."""
        self.wait(lambda: self.running.standby > 0, "to have an engine standing by")

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Returns when something holds. Raises ServerError where it does not in time, or the server ends."""

        def check() -> bool:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with status {self._process.returncode}: {self._tail()}")
            return holds()

        _wait(check, lambda: f"the server {what}: {self._tail()}", self._patience)

    def _running(self) -> Running | None:
        return find_running(self.state) if self._process.poll() is None else None

    def _tail(self) -> str:
        return " | ".join(self._console.read_text(errors="replace").splitlines()[-8:])


def _wait(holds: Callable[[], bool], what: Callable[[], str], patience: float) -> None:
    end = time.monotonic() + patience
    while not holds():
        if time.monotonic() > end:
            raise ServerError(f"waited {patience:g} s in vain for {what()}")
        time.sleep(_NAP)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kill(pid: int) -> float:
    with suppress(ProcessLookupError):  # it was quicker
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def _children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _is_alive(pid: int) -> bool:
    """Tells whether a process runs; one that has ended and was not waited for (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
