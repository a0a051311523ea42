"""A real server on a streamed base: its weights cannot be read for a while, and its engine is killed."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coserve.model.load import load_base
from coserve_benchmarks.served import Served, Victim
from models import save, tiny

PATIENCE = 300.0  # seconds: imports take a minute on a machine that is busy
JOBS = "/v1/fine_tuning/jobs"
DATA = "".join(json.dumps({"prompt": f"{i}?", "completion": f" {i * i}"}) + "\n" for i in range(64)).encode()
SEED = 25
SPOKEN = "all work waits"


class Streamed:
    """A server on a streamed base, whose file can be truncated and put back."""

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
            watchdog_seconds=8,
        )
        self.log = self.served.state / "log" / "engine.log"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.served.url + path, timeout=PATIENCE)

    def train(self, epochs: int = 2) -> str:
        with httpx.Client(base_url=self.served.url, timeout=PATIENCE) as client:
            file = client.post("/v1/files", files={"file": ("t.jsonl", DATA)}, data={"purpose": "fine-tune"})
            body = {
                "model": self.served.name,
                "training_file": file.json()["id"],
                "hyperparameters": {"n_epochs": epochs, "batch_size": 4},
                "seed": 5,
            }
            job = client.post(JOBS, json=body)
            assert job.status_code == 200, job.text
            return str(job.json()["id"])

    def status(self, job: str) -> str:
        return str(self.get(f"{JOBS}/{job}").json()["status"])

    def losses(self, job: str) -> list[tuple[int, float]]:
        """Of the ended job, by optimizer step."""
        self.served.wait(lambda: self.status(job) not in ("queued", "running"), "to train")
        assert self.status(job) == "succeeded"
        events = self.get(f"{JOBS}/{job}/events?limit=1000").json()["data"]
        found = [event["data"] for event in events if event["type"] == "metrics"]
        return sorted((step["step"], step["train_loss"]) for step in found)

    def steps(self) -> float:
        name = "coserve_engine_steps_total "
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).removeprefix(name))


class Stream:
    """An answer under way."""

    def __init__(self, served: Served, tokens: int = 700) -> None:
        self._url = f"{served.url}/v1/completions"
        self._body: dict[str, Any] = {
            "model": served.name, "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self.text, self.begun, self.leaves = "", threading.Event(), False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self.begun.wait(PATIENCE)

    def _listen(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.begun.set()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def whole(self) -> str:
        self._thread.join(PATIENCE)
        assert self.is_over
        return self.text


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    model = save(tiny("llama", max_position_embeddings=1024), tmp_path_factory.mktemp("model"))
    streamed = Streamed(tmp_path_factory.mktemp("served"), model)
    with streamed.served:
        yield streamed


@pytest.fixture(scope="module")
def peace(streamed: Streamed) -> tuple[str, list[tuple[int, float]]]:
    """An answer, and the losses of a job beside it."""
    job, stream = streamed.train(), Stream(streamed.served)
    return stream.whole(), streamed.losses(job)


def test_all_work_waits_for_weights_and_goes_on(
    streamed: Streamed, peace: tuple[str, list[tuple[int, float]]]
) -> None:
    """Longer than a hang would take to be noticed. A job is cancelled meanwhile, and an answer that comes."""
    served, engine = streamed.served, streamed.served.running.engine
    said = streamed.log.read_text().count(SPOKEN)
    job, other = streamed.train(), streamed.train(40)
    streamed.served.wait(lambda: streamed.status(other) == "running", "to train")
    stream = Stream(served)
    streamed.file.write_bytes(b"")
    try:
        served.wait(lambda: streamed.get("/health/ready").status_code == 503, "to say that it waits")
        text = streamed.get("/health/ready").json()["error"]["message"]
        assert "all work waits" in text and "model.safetensors is too short" in text
        assert streamed.get("/health").json()["engine"] == "waiting"
        assert "coserve_weights_unreadable 1.0" in streamed.get("/metrics").text
        assert streamed.get(f"{JOBS}/{other}").status_code == 200
        assert httpx.post(f"{served.url}{JOBS}/{other}/cancel", timeout=PATIENCE).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{served.url}/v1/completions",
                json={"model": served.name, "prompt": [1], "max_tokens": 2},
                timeout=0.5,
            )
        steps, so_far = streamed.steps(), stream.text
        time.sleep(17)  # a watchdog of 8 s would have ended it (one of 4 s did, on a busy machine)
        assert streamed.steps() == steps and stream.text == so_far and not stream.is_over
        assert streamed.log.read_text().count(SPOKEN) == said + 1
    finally:
        streamed.file.write_bytes(streamed.content)
    assert (stream.whole(), streamed.losses(job)) == peace
    assert streamed.status(other) == "cancelled" and served.running.engine == engine
    served.wait(lambda: "coserve_weights_unreadable 0.0" in streamed.get("/metrics").text, "to say so")
    assert streamed.get("/health/ready").status_code == 200


def kill(streamed: Streamed, kills: int, seed: int) -> tuple[str, list[tuple[int, float]]]:
    """As `peace`, of an engine that is killed at random moments."""
    served, draws = streamed.served, random.Random(seed)
    job, stream = streamed.train(), Stream(served)
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
    served.wait(lambda: streamed.status(job) == "running", "to train")
    streamed.file.write_bytes(b"")
    try:
        served.wait(lambda: streamed.get("/health/ready").status_code == 503, "to say that it waits")
        began = time.monotonic()
        served.terminate()
        assert served.wait_end() == 0
        assert time.monotonic() - began < 30  # a minute is what checkpoints have
    finally:
        streamed.file.write_bytes(streamed.content)
    served.start()
    served.wait(lambda: streamed.status(job) == "succeeded", "to go on with the job")
