"""Drawn histories of two real servers with one PostgreSQL and one artifact store, under faults.

`HISTORIES` is the number of histories of the slow test, `HISTORIES_SEED` the first one's seed.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from coserve_benchmarks.replicas.postgres import PostgresServer
from object_store import object_store
from replica_fleet import Fleet, History, fleet
from replica_history import Notes, Shown, contradictions
from replica_view import JOBS, shown_response
from whole_server import until, until_succeeded

COUNT = int(os.environ.get("HISTORIES", "100"))
SEED = int(os.environ.get("HISTORIES_SEED", "0"))
AWAY = 60.0  # seconds
# Of one history.
LEAST = {
    "files": 3,
    "jobs": 1,
    "batches": 1,
    "adapters": 3,
    "answers": 1,
    "evals": 1,
    "responses": 1,
    "runs": 1,
}


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, forks: None
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with (
        pytest.MonkeyPatch.context() as patch,
        object_store(patch) as store,
        fleet(folder, postgres, store) as made,
    ):
        yield made


@pytest.mark.postgres
def test_nothing_acknowledged_is_lost_or_doubled_while_a_server_stops(servers: Fleet) -> None:
    history = History(servers, SEED)
    found = history.run(["server stops"])
    assert not found, "\n".join([*history.faults, *found])
    assert all(history.notes.counts[what] >= least for what, least in LEAST.items()), history.notes.counts


@pytest.mark.slow
@pytest.mark.postgres
def test_drawn_histories(servers: Fleet) -> None:
    total, wrong = Counter[str](), list[str]()
    for seed in range(SEED + 1, SEED + 1 + COUNT):
        history = History(servers, seed)
        found = history.run()
        total.update(history.notes.counts)
        total.update(fault.partition(" (")[0] for fault in history.faults)
        wrong += [f"{seed} {history.faults}: {sentence}" for sentence in found]
        print(seed, history.faults, dict(history.notes.counts), found, flush=True)
    assert not wrong, "\n".join(wrong)
    assert all(total[what] >= COUNT * least for what, least in LEAST.items()), total


@pytest.mark.slow
@pytest.mark.postgres
def test_a_job_trains_on_while_the_database_is_away_for_a_minute(servers: Fleet) -> None:
    lines = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(64)]
    data = "\n".join(map(json.dumps, lines)).encode()
    owner, other = servers.servers
    headers = {"Authorization": f"Bearer {servers.secret}"}
    with httpx.Client(timeout=60.0, trust_env=False, headers=headers) as http:
        put = {"files": {"file": ("minute.jsonl", data)}, "data": {"purpose": "fine-tune"}}
        file = http.post(f"{owner.url}/v1/files", **put).json()["id"]
        body = {"model": owner.name, "training_file": file, "hyperparameters": {"n_epochs": 60}}
        job = f"{JOBS}/{http.post(f'{owner.url}{JOBS}', json=body).json()['id']}"

        def told() -> list[int]:
            reply = http.get(f"{other.url}{job}/events", params={"limit": 1000})
            reply.raise_for_status()
            return sorted(one["data"]["step"] for one in reply.json()["data"] if one["type"] == "metrics")

        until(lambda: len(told()) >= 5, "steps")
        servers.postgres.stop()
        end = time.monotonic() + AWAY
        while time.monotonic() < end:
            for server in servers.servers:
                for reply in (http.get(f"{server.url}{job}"), http.post(f"{server.url}/v1/files", **put)):
                    assert reply.status_code == 503 and reply.json()["error"]["message"], reply.text
            time.sleep(2.0)
        servers.postgres.start()
        for server in servers.servers:
            server.wait_ready()
        until_succeeded(lambda: http.get(f"{other.url}{job}").json())
        assert told() == list(range(1, max(told()) + 1)) and max(told()) >= 60
        page = http.get(f"{other.url}/v1/files", params={"limit": 100}).json()["data"]
        assert [one["filename"] for one in page].count("minute.jsonl") == 1, "what was refused is not there"


def test_the_clock_of_a_server_can_jump(tmp_path: Path) -> None:
    (ahead := tmp_path / "ahead").write_text("864000")
    clock = Path(__file__).parents[1] / "jumping_clock"
    environment = {**os.environ, "PYTHONPATH": str(clock), "CLOCK_AHEAD": str(ahead)}
    told = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"], env=environment)
    assert 863_000.0 < float(told) - time.time() < 865_000.0


def test_the_checker_sees_what_must_not_be() -> None:
    notes = Notes()
    asked = {"file": "x", "job": "2", "batch": "2", "pin": "pinned", "eval": "2", "response": "0"}
    for kind, wanted in asked.items():
        notes.ask(kind, "m", wanted).ids.append("i")  # type: ignore[arg-type]
    removed = notes.ask("key", "k")
    removed.removal_asked = removed.removed = True
    notes.ask("file", "unsure", "x")
    notes.answer("a", "1")
    job = Shown("job", "m", "i", "name weights", "succeeded", (1, 2))
    batch = Shown("batch", "m", "i", "results", "completed", (1, 2))
    run, response = replace(batch, kind="eval"), replace(batch, kind="response", steps=())
    good = [Shown("file", "m", "i", "x"), batch, Shown("pin", "m", "i", "pinned"), job, run, response]
    assert contradictions(notes, {"a": good, "b": good}) == []
    for bad, said in (
        (good[1:], "is lost"),
        ([*good, good[0]], "is there 2 times"),
        ([*good, Shown("file", "other", "i")], "never asked for"),
        ([*good, Shown("key", "k", "k")], "was removed and is there"),
        ([*good, *[Shown("file", "unsure", "i", "x")] * 2], "is there 2 times"),
        ([*good[:3], replace(job, steps=(1, 1, 2)), *good[4:]], "told the steps"),
        ([*good[:3], replace(job, content="name others"), *good[4:]], "differs between"),
        ([*good[:3], replace(job, status="failed"), *good[4:]], "is failed in the end"),
        ([*good[:4], replace(run, steps=(1,)), response], "told the steps"),
        ([*good[:4], replace(run, steps=(1, 2, 2)), response], "told the steps"),
        ([*good[:5], replace(response, status="failed")], "is failed in the end"),
        (good[:5], "is lost"),
        ([good[0], replace(batch, steps=(1,)), *good[2:]], "told the steps"),
        ([good[0], replace(batch, steps=(1, 1, 2)), *good[2:]], "told the steps"),
        ([good[0], replace(batch, content="others"), *good[2:]], "differs between"),
        ([good[0], replace(batch, status="expired"), *good[2:]], "is expired in the end"),
        ([good[0], *good[2:]], "is lost"),
        ([Shown("file", "m", "i", "y"), *good[1:]], "another content"),
        ([Shown("file", "m", "j", "x"), *good[1:]], "acknowledged as i"),
    ):
        found = contradictions(notes, {"a": good, "b": bad})
        assert any(said in sentence for sentence in found), (said, found)
    notes.answer("a", "2")
    assert contradictions(notes, {"a": good, "b": good}) == ["answers of a named the versions 1 and 2"]


def test_a_response_may_end_with_its_last_token() -> None:
    told = {"id": "i", "metadata": {"mark": "m"}, "output": [], "status": "incomplete"}
    for reason, status in (("max_output_tokens", "completed"), ("content_filter", "incomplete")):
        assert shown_response({**told, "incomplete_details": {"reason": reason}}).status == status
