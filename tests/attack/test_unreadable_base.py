"""A real server on a streamed base: its weights cannot be read for a while, and its engine is killed."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coserve.model.load import load_base
from coserve_benchmarks.served import Served, Victim
from models import save, tiny
from served_work import (
    JOBS,
    PATIENCE,
    AnswerStream,
    client_of,
    examples,
    greedy,
    job_status,
    start_job,
    wait_job,
    wait_until_all_work_waits,
)

DATA = examples(64)
SEED = 25
SPOKEN = "all work waits"
WATCHDOG = 8  # seconds; one of 4 s ended an engine on a busy machine


class Streamed:
    """A server on a streamed base, whose file can be truncated and put back."""

    client: httpx.Client

    def __init__(self, folder: Path, model: Path) -> None:
        self.file = model / "model.safetensors"
        self.content = self.file.read_bytes()
        self.served = Served(
            model,
            folder,
            PATIENCE,
            engine_base_memory=load_base(model).nbytes * 9 // 10,
            engine_cache_tokens=4096,
            engine_calibrate=False,
            engine_deterministic=True,
            standby=False,
            checkpoint_steps=5,
            watchdog_seconds=WATCHDOG,
        )
        self.log = self.served.state / "log" / "engine.log"

    def stream(self) -> AnswerStream:
        return AnswerStream(self.client, greedy(self.served, [1, 2, 3], 700))

    def train(self, epochs: int = 2) -> str:
        return start_job(self.client, self.served, DATA, {"n_epochs": epochs, "batch_size": 4}, seed=5)

    def wait(self, job: str, *states: str) -> None:
        wait_job(self.client, self.served, job, *states)

    def losses(self, job: str) -> list[tuple[int, float]]:
        """Of the ended job, by optimizer step."""
        self.wait(job, "succeeded", "failed")
        assert job_status(self.client, job) == "succeeded"
        events = self.client.get(f"{JOBS}/{job}/events?limit=1000").json()["data"]
        found = [event["data"] for event in events if event["type"] == "metrics"]
        return sorted((step["step"], step["train_loss"]) for step in found)

    def steps(self) -> float:
        name = "coserve_engine_steps_total "
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).removeprefix(name))


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    model = save(tiny("llama", max_position_embeddings=1024), tmp_path_factory.mktemp("model"))
    streamed = Streamed(tmp_path_factory.mktemp("served"), model)
    with streamed.served, client_of(streamed.served) as streamed.client:
        yield streamed


@pytest.fixture(scope="module")
def peace(streamed: Streamed) -> tuple[str, list[tuple[int, float]]]:
    """An answer, and the losses of a job beside it."""
    job, stream = streamed.train(), streamed.stream()
    return stream.whole(), streamed.losses(job)


@pytest.mark.slow  # 40 s; `unit/streamed/test_unreadable.py` has the same within an engine
def test_all_work_waits_for_weights_and_goes_on(
    streamed: Streamed, peace: tuple[str, list[tuple[int, float]]]
) -> None:
    """Longer than a hang would take to be noticed. A job is cancelled meanwhile, and an answer that comes."""
    served, client, engine = streamed.served, streamed.client, streamed.served.running.engine
    said = streamed.log.read_text().count(SPOKEN)
    job, other = streamed.train(), streamed.train(40)
    streamed.wait(other, "running")
    stream = streamed.stream()
    streamed.file.write_bytes(b"")
    try:
        wait_until_all_work_waits(client, served, "model.safetensors is too short")
        assert job_status(client, other) == "running"
        assert client.post(f"{JOBS}/{other}/cancel").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=greedy(served, [1], 2), timeout=0.5)
        steps, so_far = streamed.steps(), stream.text
        time.sleep(WATCHDOG + 2)
        assert streamed.steps() == steps and stream.text == so_far and not stream.is_over
        assert streamed.log.read_text().count(SPOKEN) == said + 1
    finally:
        streamed.file.write_bytes(streamed.content)
    served.wait(lambda: stream.text != so_far or stream.is_over, "the answer to go on")
    assert client.get("/health/ready").status_code == 200  # no later than the first token
    assert (stream.whole(), streamed.losses(job)) == peace
    assert job_status(client, other) == "cancelled" and served.running.engine == engine
    served.wait(lambda: "coserve_weights_unreadable 0.0" in client.get("/metrics").text, "to say so")
    assert client.get("/health/ready").status_code == 200


def kill(streamed: Streamed, kills: int, seed: int) -> tuple[str, list[tuple[int, float]]]:
    """As `peace`, of an engine that is killed at random moments."""
    served, draws = streamed.served, random.Random(seed)
    job, stream = streamed.train(), streamed.stream()
    for _ in range(kills):
        time.sleep(draws.uniform(0, 0.6))
        engine = served.running.engine
        served.kill(Victim.ENGINE)
        served.wait_ready(without={engine})
    return stream.whole(), streamed.losses(job)


@pytest.mark.slow  # half a minute of both cores: the server starts three times
def test_a_killed_engine_goes_on_with_a_streamed_base(
    streamed: Streamed, peace: tuple[str, list[tuple[int, float]]]
) -> None:
    assert kill(streamed, 1, SEED) == peace


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_engines_with_a_streamed_base_are_killed(
    streamed: Streamed, peace: tuple[str, list[tuple[int, float]]], seed: int
) -> None:
    assert kill(streamed, 3, seed) == peace


@pytest.mark.slow
def test_a_server_ends_in_order_while_weights_cannot_be_read(streamed: Streamed) -> None:
    """Without checkpoints: its job goes on afterwards."""
    served = streamed.served
    job = streamed.train(20)
    streamed.wait(job, "running")
    streamed.file.write_bytes(b"")
    try:
        wait_until_all_work_waits(streamed.client, served, "model.safetensors is too short")
        began = time.monotonic()
        served.terminate()
        assert served.wait_end() == 0
        assert time.monotonic() - began < 30  # a minute is what checkpoints have
    finally:
        streamed.file.write_bytes(streamed.content)
    served.start()
    streamed.wait(job, "succeeded")
