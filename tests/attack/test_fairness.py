"""A quiet tenant beside one that takes all it can get: 64 streams without end, and 8 jobs."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median

import flood
import httpx2
import pytest

from coserve.serve.store.store import Store
from hostile_bodies import TEXT, text
from whole_server import PATIENCE, Server

STREAMS, JOBS = 64, 8
_NUMBERS = count(1)
RECORDS = [{"prompt": f"The number {number} is", "completion": " even. " * 20} for number in range(400)]


@pytest.mark.slow
def test_a_quiet_tenants_first_token_beside_a_loud_one(tmp_path: Path) -> None:
    """Prints both medians, alone and beside, taken in turn; COSERVE_QUIET is how many requests each."""
    requests = int(os.environ.get("COSERVE_QUIET", "24"))
    (tmp_path / "state").mkdir()
    with Store(tmp_path / "state") as store:
        loud = asyncio.run(store.tenants.create_key("loud"))[1]
        quiet = asyncio.run(store.tenants.create_key("quiet"))[1]
    more = {"COSERVE_ENGINE_CALIBRATE": "true", "COSERVE_ENGINE_CACHE_TOKENS": "32768"}
    server = Server(tmp_path, **more)
    try:
        alone, beside = list[float](), list[float]()
        jobs = _jobs(server.url, loud)
        for _ in range(4):
            _change(server.url, loud, jobs, "pause")
            alone += _first_tokens(server.url, quiet, requests // 4)
            _change(server.url, loud, jobs, "resume")
            with _flooded(server.url, loud):
                beside += _first_tokens(server.url, quiet, requests // 4)
    finally:
        server.end()
    ratio = median(beside) / median(alone)
    for name, times in (("alone", alone), ("beside", beside)):
        print(f"{name}: {len(times)} first tokens, median {median(times):.3f} s, max {max(times):.3f} s")
    print(f"{ratio:.2f} times as long, load {os.getloadavg()[0]:.1f}")
    assert ratio < 3.0  # the goal is 2; the machine is not always a test's own


def _jobs(url: str, key: str) -> list[str]:
    """Jobs without a foreseeable end, one of which is under way."""
    lines = "\n".join(map(json.dumps, RECORDS)).encode()
    with _client(url, key) as http:
        form = {"file": ("data.jsonl", lines)}
        sent = http.post("/v1/files", data={"purpose": "fine-tune"}, files=form)
        file = sent.json()["id"]
        body = {"model": "coserve-tiny", "training_file": file, "hyperparameters": {"n_epochs": 50}}
        made = [http.post("/v1/fine_tuning/jobs", json=body).json()["id"] for _ in range(JOBS)]
        end, statuses = time.monotonic() + PATIENCE, [""]
        while "running" not in statuses:  # those that memory has no room for wait
            assert time.monotonic() < end and "failed" not in statuses, statuses
            time.sleep(0.2)
            statuses = [http.get(f"/v1/fine_tuning/jobs/{job}").json()["status"] for job in made]
        print(f"{statuses.count('running')} of {JOBS} jobs run, the others wait")
    return made


def _change(url: str, key: str, jobs: list[str], change: str) -> None:
    with _client(url, key) as http:
        for job in jobs:
            http.post(f"/v1/fine_tuning/jobs/{job}/{change}")
    time.sleep(2.0)


@contextmanager
def _flooded(url: str, key: str) -> Iterator[None]:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(text(model="coserve-tiny", stream=True, max_tokens=200, ignore_eos=True))
    process = subprocess.Popen([sys.executable, flood.__file__, host, port, str(STREAMS), key, body])
    try:
        time.sleep(3.0)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def _first_tokens(url: str, key: str, requests: int) -> list[float]:
    """Seconds until each first token, one request after the other. No two prompts begin alike: what an
    earlier one left in the cache would count as speed where nobody else has pushed it out."""
    found = []
    with _client(url, key) as http:
        for _ in range(requests):
            prompt = f"{next(_NUMBERS)} is the number of this one: " + "tell me something new. " * 12
            body = text(model="coserve-tiny", stream=True, max_tokens=4, prompt=prompt, ignore_eos=True)
            began = time.monotonic()
            with http.stream("POST", TEXT, json=body) as answer:
                assert answer.status_code == 200
                pieces = answer.iter_raw()
                next(pieces)
                found.append(time.monotonic() - began)
                for _ in pieces:
                    pass
            time.sleep(0.2)
    return found


def _client(url: str, key: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE)
