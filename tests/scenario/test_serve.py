"""`coserve serve` from outside, with the embedded model: answers, killed processes, the end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coserve.cli.client import Client
from coserve.cli.config import ClientSettings
from coserve.errors import CoserveError
from coserve.serve.processes.claim import find_running

PATIENCE = 60.0  # seconds; only a hang takes so long
SMALL = {"COSERVE_ENGINE_CALIBRATE": "false", "COSERVE_ENGINE_CACHE_TOKENS": "4096"}
RUN = "from coserve.cli import main; main()"
ASK = {"model": "coserve-tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def until(found: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


def children_of(pid: int) -> dict[int, str]:
    """Process ids and command lines."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


class Server:
    """One `coserve serve`, its children by what they run, and a client."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.state = folder / "state"
        self.log = folder / "console"
        with self.log.open("w") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, "serve", "--port", "0", "--state", str(self.state), *flags],
                stdout=console,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "COSERVE_ENGINE_CALIBRATE": "false",
                    "COSERVE_ENGINE_CACHE_TOKENS": "4096",
                },
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
        return any(" --gently " in line for line in children_of(self.process.pid).values())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, "--deterministic")  # else tokens that are as likely may differ after a kill
    children = set(children_of(made.process.pid))
    yield made
    children |= set(children_of(made.process.pid)) if made.process.poll() is None else set()
    made.process.kill()
    made.process.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no process left")


def ask(client: Client, **more: object) -> str:
    answer = client.post("/v1/chat/completions", {**ASK, **more})
    return str(answer["choices"][0]["message"]["content"])


def test_it_answers_survives_a_killed_engine_and_ends_in_order(server: Server) -> None:
    with server.client() as client:
        assert [model["id"] for model in client.get("/v1/models")["data"]] == ["coserve-tiny"]
        first = ask(client, max_tokens=12)
        assert first
        until(server.stands_by, "an engine standing by")

        pieces: list[str] = []
        body = {**ASK, "stream": True, "max_tokens": 300, "ignore_eos": True}

        def listen() -> None:
            with server.client() as other:
                for event in other.events("/v1/chat/completions", body):
                    pieces.extend(choice["delta"].get("content") or "" for choice in event["choices"])

        listening = threading.Thread(target=listen)
        listening.start()
        until(lambda: len(pieces) > 10, "the beginning of a stream")
        os.kill(server.pid_of("coserve.engine.process"), signal.SIGKILL)
        listening.join(PATIENCE)
        assert not listening.is_alive()
        assert "".join(pieces) == ask(client, max_tokens=300, ignore_eos=True)
        until(lambda: "the engine is ready again" in server.said(), "said so")

        os.kill(server.pid_of("coserve.serve.main"), signal.SIGKILL)
        until(lambda: _answers(client, first), "an API again")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    assert server.said().splitlines()[-1] == "stopped"
    assert find_running(server.state) is None


def _answers(client: Client, first: str) -> bool:
    try:
        return ask(client, max_tokens=12) == first
    except CoserveError:  # the connection that the killed process held
        return False


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN]
    state = ["--state", str(tmp_path / "state")]
    serve = [*command, "serve", "--host", "0.0.0.0", "--port", "0", *state]
    refused = subprocess.run(serve, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 1 and "key" in refused.stderr and len(refused.stderr.splitlines()) == 1
    created = subprocess.run(
        [*command, "keys", "create", "me", "--json", *state], capture_output=True, text=True, timeout=PATIENCE
    )
    assert json.loads(created.stdout)["tenant"] == "me"
