"""Row `first_byte_p99_ms`: time to the first byte of a stream while two jobs train."""

import time
from functools import partial

import numpy as np

from coserve.simulate.intervals import percentile
from coserve.workload.requests import poisson_requests
from coserve_benchmarks.client import Clients
from coserve_benchmarks.folder import training_file
from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.recording_client import RecordingClient
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from coserve_benchmarks.timing import OF_REQUESTS

_EXAMPLES = 16  # batches of different data before they repeat
_EPOCHS = 50  # more than any run takes
_NAP = 0.05  # seconds


def run(bench: Bench, served: Served) -> None:
    """Measures the same arrivals without training and with it."""
    settings, results = bench.settings, bench.results
    alone = _first_bytes(bench, served)
    ledger = RecordingClient(served.url, served.name)
    try:
        jobs = _start_jobs(bench, ledger)
        began, before = time.monotonic(), _trained(ledger, jobs)
        together = _first_bytes(bench, served)
        rate = (_trained(ledger, jobs) - before) / (time.monotonic() - began)
        for job in jobs:
            ledger.cancel_job(job)
    finally:
        ledger.close()
    tail = partial(np.quantile, q=0.99)
    for name, waits in (("alone", alone), ("training", together)):
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            results.figure(f"first_byte.{name}_{label}", 1000 * percentile(waits, share), "ms")
        results.series(f"first_byte.{name}", [round(wait, 5) for wait in sorted(waits)])
    results.figure("first_byte.trained", rate, "fine-tuning tokens/s meanwhile")
    note = (
        f"{len(together)} streams of {settings.arrivals_prompt} tokens in and {settings.arrivals_answer} "
        f"out, {settings.arrivals:g} a second at random instants, beside two jobs of "
        f"{settings.server_batch} x {settings.server_length} tokens a step; the first byte comes with the "
        "first token"
    )
    waits = [1000 * wait for wait in together]
    results.row("first_byte_p99_ms", percentile(waits, 0.99), interval(tail, waits), note, OF_REQUESTS)


def _first_bytes(bench: Bench, served: Served) -> list[float]:
    """Seconds from each arrival to its first byte."""
    settings = bench.settings
    requests = poisson_requests(
        settings.arrivals, settings.arrivals_seconds, settings.arrivals_prompt, settings.arrivals_answer,
        bench.shape.vocabulary, settings.seed,
    )  # fmt: skip
    asks = [StreamRequest(request.prompt, request.answer, request.at) for request in requests]
    with Clients(served.url, served.name, asks) as clients:
        return [one.first_byte - one.asked for one in clients.result()]


def _start_jobs(bench: Bench, ledger: RecordingClient) -> list[str]:
    """Starts two jobs; returns when both are past their first step."""
    settings = bench.settings
    examples = settings.server_batch * _EXAMPLES
    data = ledger.upload(training_file(bench.shape, examples, settings.server_length, settings.seed))
    hyperparameters = {"n_epochs": _EPOCHS, "batch_size": settings.server_batch}
    jobs = [ledger.start_job(data, hyperparameters=hyperparameters, seed=seed) for seed in (1, 2)]
    while not all(ledger.losses(job) for job in jobs):
        time.sleep(_NAP)
    return jobs


def _trained(ledger: RecordingClient, jobs: list[str]) -> float:
    return sum(ledger.trained_tokens(job) for job in jobs)
