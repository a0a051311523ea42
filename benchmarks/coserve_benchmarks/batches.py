"""Row `batch.live_p99`: the last tokens of live answers beside a batch of 2,000 requests, over without."""

import json
import time

import httpx

from coserve.errors import ServerError
from coserve.simulate.intervals import percentile
from coserve.workload.requests import poisson_requests
from coserve_benchmarks.client import Clients
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from coserve_benchmarks.timing import ratio_of

LINES = 2000
_ANSWER = 16  # tokens of each request of the batch
_NAP = 0.05  # seconds
_TURN = 22.0  # seconds: eleven turns and a start take less than five minutes


def run(bench: Bench, served: Served) -> None:
    """Measures the same arrivals without the batch and beside it, in turns: each round's quotient is that of
    one turn beside it and the two without it around that."""
    ratios, lines = list[float](), list[float]()
    before = _last_tokens(bench, served)
    for _ in range(bench.settings.slowdown_rounds):
        beside, done = _beside(bench, served)
        after = _last_tokens(bench, served)
        ratios.append(percentile(beside, 0.99) / percentile([*before, *after], 0.99))
        lines.append(done)
        before = after
    bench.results.ratio("batch.live_p99", ratio_of(ratios))
    done = sum(lines) / len(lines)
    bench.results.figure("batch.lines", done, f"of {LINES} requests that were answered meanwhile")


def _beside(bench: Bench, served: Served) -> tuple[list[float], float]:
    """Live answers beside a batch, and the lines that it got done meanwhile."""
    with httpx.Client(base_url=f"{served.url}/v1", timeout=60.0, trust_env=False) as http:
        batch = _begin(http, served.name)
        beside = _last_tokens(bench, served)
        done = http.get(f"/batches/{batch}").json()["request_counts"]["completed"]
        http.post(f"/batches/{batch}/cancel").raise_for_status()
        while http.get(f"/batches/{batch}").json()["status"] == "cancelling":
            time.sleep(_NAP)
    return beside, float(done)


def _begin(http: httpx.Client, model: str) -> str:
    """Starts a batch; returns its id once a line is done. Raises ServerError where it does not start."""
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": _ANSWER, "ignore_eos": True}
    lines = [
        json.dumps(
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"seed": i}}
        )
        for i in range(LINES)
    ]
    file = http.post(
        "/files", files={"file": ("lines.jsonl", "\n".join(lines))}, data={"purpose": "batch"}
    ).json()
    made = http.post(
        "/batches",
        json={"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"},
    ).json()
    while not (batch := http.get(f"/batches/{made['id']}").json())["request_counts"]["completed"]:
        if batch["status"] not in ("validating", "in_progress"):
            raise ServerError(f"the batch is {batch['status']}")
        time.sleep(_NAP)
    id: str = made["id"]
    return id


def _last_tokens(bench: Bench, served: Served) -> list[float]:
    """Seconds from each arrival to its last token."""
    settings = bench.settings
    requests = poisson_requests(
        settings.arrivals, min(settings.arrivals_seconds, _TURN), settings.arrivals_prompt,
        settings.arrivals_answer, bench.shape.vocabulary, settings.seed,
    )  # fmt: skip
    asks = [StreamRequest(request.prompt, request.answer, request.at) for request in requests]
    with Clients(served.url, served.name, asks) as clients:
        return [one.ended - one.asked for one in clients.result()]
