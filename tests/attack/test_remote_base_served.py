"""A real server whose linears a base executor computes, which goes away under answers and a job."""

from pathlib import Path

import pytest

from coserve_benchmarks.served import Served
from models import save, tiny
from served_work import (
    PATIENCE,
    AnswerStream,
    answer_text,
    client_of,
    examples,
    greedy,
    job_status,
    start_job,
    wait_job,
    wait_until_all_work_waits,
)
from split_served import serving


@pytest.mark.usefixtures("forks")
def test_all_work_waits_for_the_executor_and_goes_on(tmp_path: Path) -> None:
    model = save(tiny("llama"), tmp_path / "model")
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(tiny("llama"), tmp_path) as base:
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
        with served, client_of(served) as client:
            body = greedy(served, [1, 2, 3], 200)
            wanted, engine = answer_text(client, body), served.running.engine
            job = start_job(client, served, examples(64), {"n_epochs": 1})
            stream = AnswerStream(client, body)
            base.stop()
            wait_until_all_work_waits(client, served, "no executor answers at unix:")
            assert not stream.is_over and job_status(client, job) in ("queued", "running")
            base.start()
            assert stream.whole() == wanted and served.running.engine == engine
            wait_job(client, served, job, "succeeded")
            served.wait(lambda: client.get("/health/ready").status_code == 200, "to say so")
