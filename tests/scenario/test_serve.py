"""`coserve serve` from outside, with the embedded model: answers, killed processes, the end."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve.cli.client import Client
from coserve.errors import CoserveError
from coserve.serve.processes.claim import find_running
from whole_server import PATIENCE, RUN, Server, children_of, until

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 1}},
    "required": ["age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASK = {"model": "coserve-tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, "--deterministic")  # else tokens that are as likely may differ after a kill
    children = set(children_of(made.process.pid))
    yield made
    made.end()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no process left")


def ask(client: Client, **more: object) -> str:
    answer = client.post("/v1/chat/completions", {**ASK, **more})
    return str(answer["choices"][0]["message"]["content"])


def test_it_answers_survives_a_killed_engine_and_ends_in_order(server: Server) -> None:
    with server.client() as client:
        assert [model["id"] for model in client.get("/v1/models")["data"]] == ["coserve-tiny"]
        first = ask(client, max_tokens=12)
        assert first
        assert json.loads(ask(client, response_format=FORM)).keys() == {"age"}
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


@pytest.mark.usefixtures("forks")
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
