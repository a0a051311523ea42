"""Answers and jobs under way at a real server (`Served`), for tests that harm the server meanwhile."""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from coserve_benchmarks.served import Served

PATIENCE = 300.0  # seconds: imports take a minute on a machine that is busy
JOBS = "/v1/fine_tuning/jobs"


def client_of(served: Served, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=PATIENCE, headers=headers)


def greedy(served: Served, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The body of a request for an answer of so many tokens, the same each time."""
    return {
        "model": served.name,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def answer_text(client: httpx.Client, body: dict[str, Any]) -> str:
    found = client.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


class AnswerStream:
    """A streamed answer under way, which a thread of its own reads."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self._client, self._body = client, {**body, "stream": True}
        self.text, self.is_whole = "", False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(PATIENCE)

    def _read(self) -> None:
        with (
            suppress(httpx.HTTPError),  # of a server that is killed
            self._client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            for line in response.iter_lines():
                self.is_whole = line == "data: [DONE]" or self.is_whole
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self._begun.set()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def whole(self) -> str:
        """Waits for the end; returns the text."""
        self._thread.join(PATIENCE)
        assert self.is_over
        return self.text


def examples(count: int) -> bytes:
    """A training file."""
    lines = ({"prompt": f"{i}?", "completion": f" {i * i}"} for i in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def ask_for_job(
    client: httpx.Client, served: Served, data: bytes, hyperparameters: dict[str, Any], **fields: Any
) -> httpx.Response:
    file = client.post("/v1/files", files={"file": ("t.jsonl", data)}, data={"purpose": "fine-tune"})
    body = {"model": served.name, "training_file": file.json()["id"], "hyperparameters": hyperparameters}
    return client.post(JOBS, json={**body, **fields})


def start_job(
    client: httpx.Client, served: Served, data: bytes, hyperparameters: dict[str, Any], **fields: Any
) -> str:
    """Starts a job; returns its id."""
    job = ask_for_job(client, served, data, hyperparameters, **fields)
    assert job.status_code == 200, job.text
    return str(job.json()["id"])


def job_status(client: httpx.Client, job: str) -> str:
    return str(client.get(f"{JOBS}/{job}").json()["status"])


def wait_job(client: httpx.Client, served: Served, job: str, *states: str) -> None:
    served.wait(lambda: job_status(client, job) in states, f"to have the job {' or '.join(states)}")


def wait_until_all_work_waits(client: httpx.Client, served: Served, reason: str) -> None:
    """Returns once health and metrics say that weights cannot be read, with the reason."""
    served.wait(lambda: client.get("/health/ready").status_code == 503, "to say that it waits")
    text = client.get("/health/ready").json()["error"]["message"]
    assert "all work waits" in text and reason in text
    assert client.get("/health").json()["engine"] == "waiting"
    assert "coserve_weights_unreadable 1.0" in client.get("/metrics").text
