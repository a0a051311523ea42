"""Record of all that a server has acknowledged to its clients, all of which must survive any crash."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from coserve.errors import ServerError

_PAGE = 100
_PAUSE = 0.03  # seconds between two looks at a job
_OVER = ("succeeded", "failed", "cancelled")
JSONObject = dict[str, Any]
Seen = dict[tuple[str, str], str]  # (kind, id): what must never change


class RecordingClient:
    """A client of a server that records every answer about its files and jobs.

    Methods raise httpx.HTTPError where the connection breaks (nothing is acknowledged then) and ServerError
    where the server refuses.
    """

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)
        self._model = model
        self._seen: Seen = {}
        self._jobs: list[str] = []

    def __len__(self) -> int:
        """Number of items that were acknowledged."""
        return len(self._seen)

    def close(self) -> None:
        self._http.close()

    # What is asked for

    def upload(self, data: bytes, name: str = "data.jsonl") -> str:
        """Stores a training file; its id."""
        found = self._ask(
            "POST", "/v1/files", data={"purpose": "fine-tune"}, files={"file": (name, data, "text/plain")}
        )
        self._seen["file", found["id"]] = _file(found)
        self._seen["content", found["id"]] = _digest(data)
        return str(found["id"])

    def start_job(self, file: str, **fields: Any) -> str:
        """Creates a fine-tuning job; its id."""
        body = {"model": self._model, "training_file": file, **fields}
        found = self._ask("POST", "/v1/fine_tuning/jobs", json=body)
        self._seen["job", found["id"]] = _job(found)
        self._jobs.append(found["id"])
        return str(found["id"])

    def follow(self, id: str) -> None:
        """Records the state of a job that another client has created, too."""
        self._jobs.append(id)

    def cancel_job(self, id: str) -> None:
        self._ask("POST", f"/v1/fine_tuning/jobs/{id}/cancel")

    def is_over(self, id: str) -> bool:
        """Tells whether a job has ended: succeeded, failed or cancelled."""
        return self.job(id)["status"] in _OVER

    def job(self, id: str) -> JSONObject:
        return self._ask("GET", f"/v1/fine_tuning/jobs/{id}")

    def losses(self, id: str) -> list[tuple[int, float]]:
        """The optimizer steps that a job's events tell of, and the training loss of each, in order."""
        return sorted((step["step"], step["train_loss"]) for step in self._steps(id))

    def trained_tokens(self, id: str) -> int:
        """Tokens that passed forward and back so far."""
        return sum(step["tokens"] for step in self._steps(id))

    def weights(self, adapter: str) -> bytes:
        """A finished adapter's safetensors."""
        answer = self._http.get(f"/v1/adapters/{quote(adapter, safe=':')}/weights")
        if answer.is_error:
            raise ServerError(f"{adapter}: status {answer.status_code}")
        return answer.content

    def wait_job(self, id: str, patience: float = 120.0) -> JSONObject:
        """A job once it is over. Raises ServerError if it does not succeed in time."""
        end = time.monotonic() + patience
        while (job := self.job(id))["status"] not in _OVER:
            if time.monotonic() > end:
                raise ServerError(f"the job {id} is {job['status']} after {patience:g} s")
            time.sleep(_PAUSE)
        if job["status"] != "succeeded":
            raise ServerError(f"the job {id} {job['status']}: {job['error']}")
        return job

    # What was acknowledged

    def look(self) -> None:
        """Records what the server shows of the jobs: showing it acknowledges it."""
        self._seen.update(self._shown())

    def missing(self) -> list[str]:
        """Items that were acknowledged and are lost, or differ; a sentence for each."""
        there = self._shown()
        lost = []
        for (kind, id), what in self._seen.items():
            now = there.get((kind, id))
            if kind in ("file", "content"):
                now = self._stored(kind, id)
            if now != what:
                lost.append(f"{kind} {id}: {what!r} was acknowledged, {now!r} is there")
        return lost

    def _steps(self, id: str) -> list[JSONObject]:
        events = self._all(f"/v1/fine_tuning/jobs/{id}/events")
        return [event["data"] for event in events if event["type"] == "metrics"]

    def _stored(self, kind: str, id: str) -> str:
        answer = self._http.get(f"/v1/files/{id}" + ("/content" if kind == "content" else ""))
        if answer.is_error:
            return f"status {answer.status_code}"
        return _digest(answer.content) if kind == "content" else _file(answer.json())

    def _shown(self) -> Seen:
        found: Seen = {}
        for id in self._jobs:
            job = self.job(id)
            found["job", id] = _job(job)
            if job["status"] in _OVER:
                found["end", id] = f"{job['status']}, {job['fine_tuned_model']}, {job['result_files']}"
            for event in self._all(f"/v1/fine_tuning/jobs/{id}/events"):
                found["event", event["id"]] = event["message"]
            for kept in self._all(f"/v1/fine_tuning/jobs/{id}/checkpoints"):
                name = kept["fine_tuned_model_checkpoint"]
                found["checkpoint", kept["id"]] = f"{name} at step {kept['step_number']}"
        for model in self._ask("GET", "/v1/models")["data"]:
            found["model", model["id"]] = "served"
        return found

    def _all(self, path: str) -> Iterator[JSONObject]:
        """All pages of a list."""
        query: dict[str, Any] = {"limit": _PAGE}
        while True:
            page = self._ask("GET", path, params=query)
            yield from page["data"]
            if not page.get("has_more"):
                return
            query["after"] = page["data"][-1]["id"]

    def _ask(self, method: str, path: str, **rest: Any) -> JSONObject:
        answer = self._http.request(method, path, **rest)
        if answer.is_error:
            raise ServerError(f"{method} {path}: status {answer.status_code}, {answer.text[:500]}")
        found: JSONObject = answer.json()
        return found


def _file(file: JSONObject) -> str:
    return f"{file['filename']}, {file['bytes']} bytes"


def _job(job: JSONObject) -> str:
    return f"of {job['training_file']}, seed {job['seed']}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
