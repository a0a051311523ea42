"""A batch beside live traffic through `kill -9` of the engine, then of the whole server: each line has one
answer, which is the one that it has alone."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from whole_server import Server

MODEL, COUNT, TOKENS, COMPARED = "coserve-tiny", 2000, 4, 25
PAUSE = 0.05  # seconds between two live requests
PATIENCE = 1800.0  # seconds; only a hang takes so long


def body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": f"The number {number} is", "max_tokens": TOKENS, "temperature": 0,
    }  # fmt: skip


@contextmanager
def traffic(url: str, statuses: list[int]) -> Iterator[None]:
    """Live requests one after the other, on connections of their own."""
    ends = threading.Event()

    def ask() -> None:
        live = {**body(0), "max_tokens": 24, "ignore_eos": True}
        while not ends.wait(PAUSE):
            try:
                statuses.append(httpx.post(f"{url}/v1/completions", json=live, timeout=120).status_code)
            except httpx.TransportError:
                statuses.append(0)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def told(url: str, id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/batches/{id}", timeout=120).json()
    return found


def wait(url: str, id: str, count: int) -> dict[str, Any]:
    """The batch once so many of its lines are answered, or it is over."""
    end = time.monotonic() + PATIENCE
    while (found := told(url, id))["request_counts"]["completed"] < count:
        assert found["status"] in ("validating", "in_progress") and time.monotonic() < end, found
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_each_line_has_one_answer(tmp_path: Path) -> None:
    statuses = list[int]()
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body(n)}
        for n in range(COUNT)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    first = Server(tmp_path)
    try:
        with httpx.Client(base_url=f"{first.url}/v1", timeout=120) as http:
            file = http.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)}).json()
            asked = {
                "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"
            }  # fmt: skip
            id = http.post("/batches", json=asked).json()["id"]
        with traffic(first.url, statuses):
            wait(first.url, id, COUNT // 4)
            os.kill(first.pid_of("coserve.engine.process"), signal.SIGKILL)
            before = wait(first.url, id, COUNT // 2)["request_counts"]["completed"]
            first.end()
    finally:
        first.end()
    second = Server(tmp_path)
    try:
        with traffic(second.url, statuses):
            assert told(second.url, id)["status"] == "in_progress"
            batch = wait(second.url, id, COUNT)
            while batch["status"] != "completed":
                time.sleep(0.1)
                batch = told(second.url, id)
        assert batch["request_counts"] == {"total": COUNT, "completed": COUNT, "failed": 0}
        assert batch["error_file_id"] is None and before < COUNT
        text = httpx.get(f"{second.url}/v1/files/{batch['output_file_id']}/content", timeout=120).text
        answers = [json.loads(line) for line in text.splitlines()]
        assert sorted(int(one["custom_id"]) for one in answers) == list(range(COUNT))
        texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
        for n in range(0, COUNT, COUNT // COMPARED):
            alone = httpx.post(f"{second.url}/v1/completions", json=body(n), timeout=120).json()
            assert alone["choices"][0]["text"] == texts[f"{n}"], n
    finally:
        second.end()
    answered = statuses.count(200)
    print(f"{answered} of {len(statuses)} live requests were answered")
    assert answered >= 10 and set(statuses) <= {200, 0, 503}
