"""One `coserve serve` as its users start it, with the embedded model; its processes are forked."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coserve.cli.client import Client
from coserve.cli.config import ClientSettings
from coserve.serve.processes.claim import find_running
from forking import forked

SMALL = {"COSERVE_ENGINE_CALIBRATE": "false", "COSERVE_ENGINE_CACHE_TOKENS": "4096"}
PATIENCE = 180.0  # seconds; only a hang takes so long
RUN = "from coserve.cli.app import main; main()"


def until(found: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


def until_succeeded(job: Callable[[], Any]) -> None:
    """Waits for the end of a job, which is asked for as the API tells it, for as long as it makes steps: how
    many a busy machine makes in a time says nothing."""
    best, end = -1, time.monotonic() + PATIENCE
    while (told := job())["status"] != "succeeded":
        assert told["status"] in ("queued", "running"), told
        step = (told["progress"] or {}).get("step") or 0
        if step > best:
            best, end = step, time.monotonic() + PATIENCE
        assert time.monotonic() < end, f"no step after {best}: {told}"
        time.sleep(0.1)


def children_of(pid: int) -> dict[int, str]:
    """Process ids and command lines."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


class Server:
    """One `coserve serve`, its children by what they run, and a client."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        self.state = folder / "state"
        self.log = folder / "console"
        with self.log.open("w") as console, forked():
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, "serve", "--port", "0", "--state", str(self.state), *flags],
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SMALL, **environment},
            )
        until(lambda: "ready in" in self.said() or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.said()
        running = find_running(self.state)
        assert running is not None and running.pid == self.process.pid
        self.url = running.url

    def said(self) -> str:
        return self.log.read_text()

    def client(self) -> Client:
        return Client(ClientSettings(self.url), patience=PATIENCE)

    def pid_of(self, module: str) -> int:
        found = [
            pid for pid, line in children_of(self.process.pid).items() if line.endswith(f".launch {module} ")
        ]
        return found[0]

    def stands_by(self) -> bool:
        return any(" --low-priority " in line for line in children_of(self.process.pid).values())

    def end(self) -> None:
        """Returns when none of its processes is left."""
        children = set(children_of(self.process.pid)) if self.process.poll() is None else set()
        self.process.kill()
        self.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no process left")
