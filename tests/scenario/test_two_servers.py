"""Two real servers with one PostgreSQL database and the same folders: what one does the other knows, and a
job whose server dies ends on the other."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve_benchmarks.replicas.postgres import PostgresServer
from whole_server import Server, children_of, until

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("forks")]

SHARED = ("files", "jobs", "adapters", "uploads", "batches", "tinker")
FREQUENT = {"COSERVE_CHECKPOINT_STEPS": "5"}
HAND_OVER = 15.0  # seconds from the owner's end to the first step on the other server
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
        kill_all(one)
        died = time.monotonic()

        def is_resumed() -> bool:
            page = other.get(f"{path}/events", params={"limit": 1000}, headers=own).json()["data"]
            return any("resumed from step" in event["message"] for event in page)

        until(is_resumed, "handed over")
        assert time.monotonic() - died < HAND_OVER
        until(lambda: other.get(path, headers=own).json()["status"] == "succeeded", "succeeded")
        assert figures() == list(range(1, 8 * 30 + 1))
        names = [model["id"] for model in other.get("/v1/models", headers=own).json()["data"]]
        assert names.count(other.get(path, headers=own).json()["fine_tuned_model"]) == 1
