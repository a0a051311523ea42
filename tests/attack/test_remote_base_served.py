"""A real server whose linears a base executor computes, which goes away under answers and a job."""

import json
import threading
from pathlib import Path

import httpx

from coserve_benchmarks.served import Served
from models import save, tiny
from split_served import serving

PATIENCE = 300.0  # seconds: imports take a minute on a machine that is busy
DATA = "".join(json.dumps({"prompt": f"{i}?", "completion": f" {i * i}"}) + "\n" for i in range(64)).encode()


def test_all_work_waits_for_the_executor_and_goes_on(tmp_path: Path) -> None:
    model = save(tiny("llama", max_position_embeddings=1024), tmp_path / "model")
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(tiny("llama", max_position_embeddings=1024), tmp_path) as base:
        served = Served(
            model,
            folder,
            PATIENCE,
            engine_base=base.address,
            engine_base_patience=0.5,
            engine_cache_tokens=4096,
            engine_calibrate=False,
            standby=False,
            watchdog_seconds=2,
        )
        with served, httpx.Client(base_url=served.url, timeout=PATIENCE) as client:

            def answer() -> str:
                body = {
                    "model": served.name, "prompt": [1, 2, 3], "max_tokens": 700, "temperature": 0,
                    "ignore_eos": True,
                }  # fmt: skip
                found = client.post("/v1/completions", json=body)
                assert found.status_code == 200, found.text
                return str(found.json()["choices"][0]["text"])

            def steps() -> float:
                name = "coserve_engine_steps_total "
                lines = client.get("/metrics").text.splitlines()
                return float(next(line for line in lines if line.startswith(name)).removeprefix(name))

            wanted, engine, answers = answer(), served.running.engine, list[str]()
            file = client.post("/v1/files", files={"file": ("t.jsonl", DATA)}, data={"purpose": "fine-tune"})
            body = {
                "model": served.name,
                "training_file": file.json()["id"],
                "hyperparameters": {"n_epochs": 2},
            }
            job = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
            before = steps()
            stream = threading.Thread(target=lambda: answers.append(answer()), daemon=True)
            stream.start()
            served.wait(lambda: steps() > before + 20, "to work")
            base.stop()
            served.wait(lambda: client.get("/health/ready").status_code == 503, "to say that it waits")
            text = client.get("/health/ready").json()["error"]["message"]
            assert "all work waits" in text and "no executor answers at unix:" in text
            assert client.get("/health").json()["engine"] == "waiting"
            assert "coserve_weights_unreadable 1.0" in client.get("/metrics").text
            assert not answers
            base.start()
            stream.join(PATIENCE)
            assert answers == [wanted] and served.running.engine == engine
            served.wait(
                lambda: client.get(f"/v1/fine_tuning/jobs/{job}").json()["status"] == "succeeded", "to train"
            )
            served.wait(lambda: client.get("/health/ready").status_code == 200, "to say so")
