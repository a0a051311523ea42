"""The server's bench on a tiny shape. What kills leave is a scenario of its own."""

import json
import math
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from coserve.core.compact import rounded
from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks import firstbyte
from coserve_benchmarks.client import Clients
from coserve_benchmarks.folder import save_shape, training_file
from coserve_benchmarks.recording_client import RecordingClient
from coserve_benchmarks.report import print_report
from coserve_benchmarks.results import SERVER_BARS
from coserve_benchmarks.served import Served
from coserve_benchmarks.server import run_server
from coserve_benchmarks.streams import StreamRequest

KEYS = {
    "overhead": "overhead.ratio",
    "latency": "first_byte_p99_ms",
    "batches": "batch.live_p99",
    "viewers": "viewers.ratio",
    "restart": "restart.ready_s",
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("group", KEYS)
def test_a_group_on_a_tiny_shape(group: str) -> None:
    results = run_server("tiny", quick=True, only=[group])
    assert [key for key in KEYS.values() if key in results] == [KEYS[group]]
    assert math.isfinite(results[KEYS[group]]) and results[KEYS[group]] > 0


@pytest.mark.slow
def test_the_whole_table_on_a_tiny_shape(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    results = run_server("tiny", quick=True, json_path=file)
    for key in KEYS.values():
        assert math.isfinite(results[key]) and results[key] > 0, key
    assert set(results["bars"]) == set(SERVER_BARS) and set(results["met"]) == {
        "overhead.ratio",
        "batch.live_p99",
        "viewers.ratio",
        "restart.ready_s",
    }
    assert results["floors"]["overhead.http"] > results["figures"]["overhead.http"]["value"]
    assert results["figures"]["first_byte.trained"]["value"] > 0
    assert results["restart.ready_s"] > results["figures"]["restart.load_s"]["value"]
    assert json.loads(file.read_text())["figures"] == rounded(results["figures"])
    console = Console(width=140, record=True)
    print_report(results, console)
    assert all(key in console.export_text(clear=False) for key in SERVER_BARS)


@pytest.mark.usefixtures("forks")
def test_counts_of_clients_are_those_of_a_plain_http_client(tmp_path: Path) -> None:
    """Tokens of answers, by the bench's streams and by lines that httpx reads; tokens of a job of 6 examples
    of 32 tokens twice, by its events and by the server's metrics, before and after."""
    shape = shape_named("tiny")
    asks = [StreamRequest((9, 8, 7), 5, tells_tokens=True), StreamRequest((4, 3), 11)]
    settings = {"engine_calibrate": False, "engine_cache_tokens": 2048, "standby": False}
    with Served(save_shape(shape, tmp_path), tmp_path, **settings) as served:
        with Clients(served.url, served.name, asks) as clients:
            heard = clients.result()
        plain = [received(served, ask) for ask in asks]
        assert [len(tokens) for tokens in plain] == [5, 11]
        assert [one.written for one in heard] == [5, 11]
        assert heard[0].tokens == plain[0] and len(heard[0].stamps) == 5
        ledger = RecordingClient(served.url, served.name)
        data = ledger.upload(training_file(shape, 6, 32, 0))
        before = metric(served)
        job = ledger.start_job(data, hyperparameters={"n_epochs": 2, "batch_size": 4})
        done = ledger.wait_job(job)
        rows = 6 * 2 * 32
        assert ledger.trained_tokens(job) == done["trained_tokens"] == metric(served) - before == rows
        assert firstbyte._trained(ledger, [job, job]) == 2 * rows
        assert len(ledger.losses(job)) == 4  # of 4 and 2 examples, twice
        ledger.close()


def received(served: Served, ask: StreamRequest) -> list[int]:
    """Ids of the tokens of a streamed answer, line by line."""
    body = json.loads(ask.body(served.name)) | {"return_token_ids": True}
    found: list[int] = []
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, trust_env=False, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found += choice.get("token_ids") or []
    return found


def metric(served: Served) -> float:
    text = httpx.get(f"{served.url}/metrics", trust_env=False).text
    name = "coserve_finetune_tokens_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are overhead, latency, batches, viewers, restart"):
        run_server("tiny", only=["speed"])
