"""Reads what one of several servers shows in the end of what clients have asked for."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx

from replica_history import Notes, Shown

JOBS: Final = "/v1/fine_tuning/jobs"
PATIENCE: Final = 400.0  # seconds for anything that has to come to its end, on a machine that is busy
AWAY: Final = (409, 429, 502, 503)  # 409 of a key whose request is under way, or of a run on its way
_OVER: Final = ("completed", "failed", "expired", "cancelled", "canceled", "incomplete")
Get = Callable[..., httpx.Response]


def view_of(url: str, headers: Mapping[str, str], notes: Notes, own: str) -> list[Shown]:
    """All that the server at `url` shows whose marks begin with `own`. Returns when nothing is under way any
    more."""
    with httpx.Client(timeout=60.0, trust_env=False, headers=headers, base_url=url) as http:

        def get(path: str, **query: Any) -> httpx.Response:
            end = time.monotonic() + PATIENCE
            while (reply := http.get(path, params=query)).status_code in AWAY:
                assert time.monotonic() < end, reply.text
                time.sleep(0.2)
            return reply

        def pages(path: str) -> Iterator[dict[str, Any]]:
            query: dict[str, Any] = {"limit": 100}
            while True:
                page = get(path, **query).json()
                yield from page["data"]
                if not page["has_more"]:
                    return
                query["after"] = page["data"][-1]["id"]

        def marked(path: str) -> list[dict[str, Any]]:
            return [one for one in pages(path) if (one["metadata"] or {}).get("mark", "").startswith(own)]

        def runs() -> list[dict[str, Any]]:
            return [run for one in marked("/v1/evals") for run in marked(f"/v1/evals/{one['id']}/runs")]

        def responses() -> list[dict[str, Any]]:
            wanted = [one for (kind, _), one in list(notes.asked.items()) if kind == "response"]
            replies = [get(f"/v1/responses/{id}") for one in wanted for id in one.ids]
            return [reply.json() for reply in replies if reply.is_success]

        _until_over(lambda: marked(JOBS), lambda job: job["finished_at"])
        for listed in (lambda: marked("/v1/batches"), runs, responses):
            _until_over(listed, lambda one: one["status"] in _OVER)
        shown = [_shown_job(get, job) for job in marked(JOBS)]
        shown += [_shown_batch(get, one) for one in marked("/v1/batches")]
        shown += [_shown_run(pages, one) for one in runs()]
        shown += [shown_response(one) for one in responses()]
        for file in pages("/v1/files"):
            if file["filename"].startswith(own):
                content = get(f"/v1/files/{file['id']}/content").content
                mark = file["filename"].removesuffix(".jsonl")
                shown.append(Shown("file", mark, file["id"], hashlib.sha256(content).hexdigest()))
        for card in pages("/v1/adapters"):
            name = card["id"]
            if name.startswith(own):
                shown.append(Shown("adapter", name, name, _weights(get, name)))
                if card["pinned"]:
                    shown.append(Shown("pin", name, name, "pinned"))
        for (kind, mark), one in list(notes.asked.items()):
            for run in one.ids if kind == "run" else ():
                found = get(f"/api/v1/training_runs/{run}/checkpoints").json()["checkpoints"]
                saved = " ".join(sorted(each["checkpoint_id"] for each in found))
                shown.append(Shown("run", mark, run, saved))
        for kind, secret in list(notes.asked):
            if kind == "key":
                told = http.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
                if told.status_code != 401:
                    shown.append(Shown("key", secret, secret))
    return shown


def _shown_job(get: Get, job: dict[str, Any]) -> Shown:
    events = get(f"{JOBS}/{job['id']}/events", limit=1000).json()["data"]
    steps = sorted(event["data"]["step"] for event in events if event["type"] == "metrics")
    name = job["fine_tuned_model"]
    content = "" if name is None else f"{name} {_weights(get, name)}"
    return Shown("job", job["metadata"]["mark"], job["id"], content, job["status"], tuple(steps))


def _shown_batch(get: Get, batch: dict[str, Any]) -> Shown:
    output = get(f"/v1/files/{batch['output_file_id']}/content").content if batch["output_file_id"] else b""
    numbers = tuple(sorted(int(json.loads(line)["custom_id"]) for line in output.splitlines()))
    digest = hashlib.sha256(output).hexdigest()
    return Shown("batch", batch["metadata"]["mark"], batch["id"], digest, batch["status"], numbers)


def _shown_run(pages: Callable[[str], Iterator[dict[str, Any]]], run: dict[str, Any]) -> Shown:
    items = list(pages(f"/v1/evals/{run['eval_id']}/runs/{run['id']}/output_items"))
    numbers = tuple(sorted(one["datasource_item_id"] + 1 for one in items))
    outcomes = sorted((one["datasource_item_id"], one["status"], str(one["sample"])) for one in items)
    digest = hashlib.sha256(repr(outcomes).encode()).hexdigest()
    return Shown("eval", run["metadata"]["mark"], run["id"], digest, run["status"], numbers)


def shown_response(response: dict[str, Any]) -> Shown:
    """A response as a server shows it; one that has all the tokens that it may have is whole."""
    digest = hashlib.sha256(json.dumps(response["output"], sort_keys=True).encode()).hexdigest()
    is_long = (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens"
    status = "completed" if is_long else response["status"]
    return Shown("response", response["metadata"]["mark"], response["id"], digest, status)


def _weights(get: Get, name: str) -> str:
    reply = get(f"/v1/adapters/{name}/weights")
    return hashlib.sha256(reply.content).hexdigest() if reply.is_success else f"status {reply.status_code}"


def _until_over(
    found: Callable[[], list[dict[str, Any]]], is_over: Callable[[dict[str, Any]], object]
) -> None:
    """Returns once all that is found is over."""
    end = time.monotonic() + PATIENCE
    while left := [one for one in found() if not is_over(one)]:
        told = [(one["id"], one["status"], one.get("waiting_for")) for one in left]
        assert time.monotonic() < end, f"not over after {PATIENCE:g} s: {told}"
        time.sleep(0.3)
