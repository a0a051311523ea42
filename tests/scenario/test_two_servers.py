"""Two real servers with one PostgreSQL database and the same folders: what one does the other knows, and a
job whose server dies ends on the other."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve_benchmarks.replicas.postgres import PostgresServer
from replica_network import Link
from whole_server import Server, children_of, until, until_succeeded

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("forks")]

SHARED = ("files", "jobs", "adapters", "uploads", "batches", "tinker")
FREQUENT = {"COSERVE_CHECKPOINT_STEPS": "5"}
RUN_STEPS = 42  # of a `tinker` client: a state is kept after 32
SEEN = 5.0  # seconds until a revoked key is refused everywhere


@contextmanager
def two_servers(folder: Path, url: str, *flags: str) -> Iterator[list[Server]]:
    """Context with two servers that share a database and folders."""
    servers = list[Server]()
    try:
        for name in ("one", "two"):
            state = folder / name / "state"
            state.mkdir(parents=True)
            for part in SHARED:
                (folder / "shared" / part).mkdir(parents=True, exist_ok=True)
                (state / part).symlink_to(folder / "shared" / part)
            servers.append(Server(folder / name, "--database", url, "--no-standby", *flags, **FREQUENT))
        yield servers
    finally:
        for server in servers:
            server.end()


def keys_command(*arguments: str) -> dict[str, Any]:
    """The JSON that a command of `coserve keys` prints."""
    done = CliRunner().invoke(app, ["keys", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kill_all(server: Server) -> None:
    """kill -9 of a server and its children at once, as a machine that loses its power."""
    children = children_of(server.process.pid)
    server.process.kill()
    for child in children:
        os.kill(child, signal.SIGKILL)
    server.process.wait()


def test_what_one_server_does_the_other_knows(tmp_path: Path, postgres: PostgresServer) -> None:
    flags = ("--require-keys",)
    url = postgres.database()
    with two_servers(tmp_path, url, *flags) as (one, two):
        keys = [keys_command("create", "ann", "--database", url) for _ in range(2)]
        ask, other = (httpx.Client(base_url=s.url, timeout=60) for s in (one, two))
        own = {"Authorization": f"Bearer {keys[0]['secret']}"}
        lines = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(64)]
        data = "\n".join(json.dumps(line) for line in lines).encode()
        sent = ask.post(
            "/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "fine-tune"}, headers=own
        )
        assert sent.status_code == 200, sent.text
        steps = {"n_epochs": 30, "batch_size": 8}
        asked = {
            "model": "coserve-tiny",
            "training_file": sent.json()["id"],
            "hyperparameters": steps,
            "seed": 1,
        }
        made = ask.post("/v1/fine_tuning/jobs", json=asked, headers=own)
        assert made.status_code == 200, made.text
        path = f"/v1/fine_tuning/jobs/{made.json()['id']}"
        seen = other.get(path, headers=own)
        assert seen.status_code == 200 and seen.json()["id"] == made.json()["id"]

        secret = {"Authorization": f"Bearer {keys[1]['secret']}"}
        assert other.get("/v1/models", headers=secret).status_code == 200
        keys_command("revoke", keys[1]["id"], "--database", url)
        end = time.monotonic() + SEEN
        while other.get("/v1/models", headers=secret).status_code != 401:
            assert time.monotonic() < end
            time.sleep(0.1)

        def figures() -> list[int]:
            page = other.get(f"{path}/events", params={"limit": 1000}, headers=own).json()["data"]
            return sorted(event["data"]["step"] for event in page if event["type"] == "metrics")

        until(lambda: len(figures()) >= 12, "steps")
        kill_all(one)  # how long the other one takes is measured by `coserve bench replicas`

        def is_resumed() -> bool:
            page = other.get(f"{path}/events", params={"limit": 1000}, headers=own).json()["data"]
            return any("resumed from step" in event["message"] for event in page)

        until(is_resumed, "handed over")
        until_succeeded(lambda: other.get(path, headers=own).json())
        assert figures() == list(range(1, 8 * 30 + 1))
        names = [model["id"] for model in other.get("/v1/models", headers=own).json()["data"]]
        assert names.count(other.get(path, headers=own).json()["fine_tuned_model"]) == 1


@contextmanager
def routed(servers: list[Server]) -> Iterator[str]:
    """Context with a router, which takes the first server that lives; its address."""

    def connect() -> socket.socket:
        for server in servers:
            if server.process.poll() is None:
                return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        raise ConnectionRefusedError

    listener = socket.create_server(("127.0.0.1", 0))
    link = Link(listener, connect)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        link.close()


def trained(url: str, seed: int, at: dict[int, Callable[[], object]]) -> tuple[list[float], list[float]]:
    """Trains a run with the `tinker` client, as its users' programs do: passes and steps on their way
    together. `at` is called before some steps. Returns what steps were told as, and the losses."""
    steps, losses = list[float](), list[float]()
    with tinker.ServiceClient(base_url=url, api_key="tml-unused") as service:
        run = service.create_lora_training_client(base_model="coserve-tiny", rank=4, seed=seed).result()
        pending = []
        for number in range(1, RUN_STEPS + 1):
            at.get(number, lambda: None)()
            tokens = [(7 * number + place) % 200 + 20 for place in range(24)]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 23}
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            passed = run.forward_backward([datum], "cross_entropy")
            pending.append((passed, run.optim_step(types.AdamParams(learning_rate=1e-3))))
            if number % 3 == 0:  # some have results that nobody has fetched when the server dies
                for one, stepped in pending:
                    losses.append(one.result().metrics["loss:sum"])
                    steps.append((stepped.result().metrics or {})["step"])
                pending = []
    return steps, losses


def test_a_tinker_program_goes_on_when_its_server_is_killed(tmp_path: Path, postgres: PostgresServer) -> None:
    """It is killed after the server has kept a state, and is another one's program of equal figures."""
    with two_servers(tmp_path, postgres.database()) as (one, two), routed([one, two]) as url:
        steps, losses = trained(url, 1, {RUN_STEPS - 4: lambda: kill_all(one)})
        assert steps == list(range(1, RUN_STEPS + 1)), "each step is done once"
        told = "".join(file.read_text() for file in (two.state / "log").iterdir() if file.is_file())
        (repeated,) = re.findall(r"goes on here, with (\d+) requests", told)
        assert int(repeated) <= 2 * (RUN_STEPS - 32), "it begins with a state"
        again, others = trained(two.url, 1, {})
        assert again == steps and losses == pytest.approx(others, rel=1e-2)
