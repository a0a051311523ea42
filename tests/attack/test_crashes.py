"""Engines of a real server that really crash, by something of one tenant's, beside another tenant's streams
and job. What is to blame is quarantined and nothing else; all that is the other tenant's ends as in peace.

`crashing.py` sets off the crashes, in processes that are otherwise what `coserve serve` runs.
"""

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from hostile import PREFIX, good, write_hostile
from safetensors.torch import save
from tinker import types
from torch import Tensor

import crashing
from coserve import tiny
from coserve.serve.store.records import QuarantineRecord
from coserve.serve.store.store import Store
from coserve_benchmarks.served import Served
from crashing import FAULTS, MARK, POISON, SEED
from served_work import (
    JOBS,
    PATIENCE,
    AnswerStream,
    answer_text,
    ask_for_job,
    client_of,
    examples,
    greedy,
    job_status,
    start_job,
    wait_job,
)

pytestmark = pytest.mark.usefixtures("forks")

WIDTHS = 256, 704  # of coserve-tiny, and of its feed-forward blocks
DATA, SHORT = examples(16), {"n_epochs": 2, "batch_size": 4}
ANSWER = 200  # tokens
TRIED = int(os.environ.get("COSERVE_ATTACK_HTTP", "60"))  # malformed adapters
PLACE = 20  # tokens of an answer before it crashes
# An exception on the thread that looks at an adapter's file ends the import, and no process.
DEFAULT = ("request", "segfault")
CRASHES = [(what, fault) for what in ("request", "job", "adapter") for fault in FAULTS][:-1]


class Crashing:
    """A server with two tenants: one that harms, and one that must not notice."""

    def __init__(self, served: Served, secrets: list[str]) -> None:
        self.served = served
        self.sent = 0  # adapters
        self.bad, self.good = (client_of(served, authorization=f"Bearer {secret}") for secret in secrets)

    def quarantine(self) -> list[QuarantineRecord]:
        with Store(self.served.state) as store:
            return list(asyncio.run(store.quarantine.list()))

    def crash(self, what: str, fault: str) -> httpx.Response:
        """Sends what crashes engines, and returns how that ended."""
        match what:
            case "request":
                prompt = [POISON, FAULTS.index(fault), PLACE]
                return self.bad.post("/v1/completions", json=greedy(self.served, prompt, ANSWER))
            case "job":
                job = self.train(self.bad, SEED + FAULTS.index(fault))
                wait_job(self.bad, self.served, job, "succeeded", "failed")
                return self.bad.get(f"{JOBS}/{job}")
            case _:
                config, tensors = good(*WIDTHS)
                return self.upload({**config, "revision": MARK + fault}, tensors)

    def upload(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> httpx.Response:
        return self.send(json.dumps(config).encode(), save(tensors))

    def send(self, config: bytes, weights: bytes) -> httpx.Response:
        """Uploads an adapter as the tenant that harms."""
        self.sent += 1
        files = {"config": config, "weights": weights}
        return self.bad.post("/v1/adapters", data={"name": f"a{self.sent}"}, files=files)

    def train(self, client: httpx.Client, seed: int) -> str:
        """A job; its id."""
        return start_job(client, self.served, DATA, SHORT, seed=seed)


@pytest.fixture(scope="module")
def world(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "site").mkdir()
    shutil.copy(crashing.__file__, folder / "site" / "sitecustomize.py")
    with Store(folder / "state") as store:
        secrets = [asyncio.run(store.tenants.create_key(name))[1] for name in ("bad", "good")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
        served = Served(
            tiny.path(),
            folder,
            PATIENCE,
            engine_cache_tokens=4096,
            engine_calibrate=False,
            engine_deterministic=True,  # so that an answer that went on elsewhere is bitwise the same
            standby=False,
            watchdog_seconds=2,
        )
    with served:
        yield Crashing(served, secrets)


@pytest.mark.parametrize(
    ("what", "fault"),
    [pytest.param(*case, marks=[] if case == DEFAULT else pytest.mark.slow) for case in CRASHES],
)
def test_what_crashes_engines_is_quarantined_and_nothing_else(world: Crashing, what: str, fault: str) -> None:
    served, before = world.served, world.quarantine()
    prompts = [[1, 2, number] for number in range(1 if (what, fault) == DEFAULT else 2)]
    asked = [greedy(served, prompt, ANSWER) for prompt in prompts]
    expected = [answer_text(world.good, body) for body in asked]
    engine, began = served.running.engine, time.monotonic()
    job = "" if (what, fault) == DEFAULT else world.train(world.good, 1)
    streams = [AnswerStream(world.good, body) for body in asked]
    answer = world.crash(what, fault)
    print(f"{what} {fault}: quarantined after {time.monotonic() - began:.1f} s: {answer.text[:300]}")
    assert "quarantined" in answer.text and f"worked on this {what}" in answer.text, answer.text
    assert [stream.whole() for stream in streams] == expected
    if job:
        wait_job(world.good, served, job, "succeeded", "failed")
        assert job_status(world.good, job) == "succeeded"
    served.wait_ready()
    assert served.running.engine != engine
    (found,) = world.quarantine()[len(before) :]
    assert found.kind == what and found.reason in answer.text.replace('\\"', '"')


@pytest.mark.slow
def test_a_session_that_crashes_engines_is_quarantined_and_another_goes_on(world: Crashing) -> None:
    """With the `tinker` client: another tenant's run and stream notice nothing."""
    served, before = world.served, world.quarantine()
    body = greedy(served, [1, 2, 9], ANSWER)
    expected = answer_text(world.good, body)
    with _training(served, world.bad) as bad, _training(served, world.good) as good:
        data = [_datum([5, 6, 7, 8])]

        def loss() -> float:
            return float(good.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])

        losses = [loss()]
        good.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        saved = bad.save_state("mine").result().path
        engine, stream = served.running.engine, AnswerStream(world.good, body)
        with pytest.raises(tinker.RequestFailedError, match="worked on this session") as refused:
            bad.forward_backward([_datum([POISON, FAULTS.index("segfault"), 5])], "cross_entropy").result()
        assert saved in str(refused.value)
        losses += [loss(), loss()]
        assert losses[1] == losses[2] < losses[0]  # it has the weights of the step before the crashes
        assert stream.whole() == expected
        served.wait_ready()
        assert served.running.engine != engine
        (found,) = world.quarantine()[len(before) :]
        assert found.kind == "session" and found.subject in saved
        with pytest.raises(tinker.APIStatusError, match="worked on this session"):
            bad.optim_step(types.AdamParams()).result()


@contextmanager
def _training(served: Served, client: httpx.Client) -> Iterator[tinker.TrainingClient]:
    """A run of a tenant's."""
    key = client.headers["authorization"].removeprefix("Bearer ")
    with tinker.ServiceClient(base_url=served.url, api_key=f"tml-{key}") as service:
        yield service.create_lora_training_client(base_model=served.name, rank=4).result()


def _datum(tokens: list[int]) -> types.Datum:
    targets = types.TensorData(data=[*tokens[1:], 4], dtype="int64", shape=[len(tokens)])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets}
    )


# What once ended engines, one after the other: fields of an adapter's configuration, and tensors.
ENDED_ENGINES: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
    ({"lora_alpha": 10**400}, {}),
    *(({"target_modules": value}, {}) for value in (10, "(", [[1]])),
    *(({"modules_to_save": value}, {}) for value in ([None], [[]])),
    ({}, {"9" * 5000 + ":x": torch.zeros(1)}),
    ({}, {f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": torch.zeros(())}),
]


@pytest.mark.slow
def test_malformed_adapters_and_jobs_are_refused_and_end_no_engine(world: Crashing, tmp_path: Path) -> None:
    served, body, became = world.served, greedy(world.served, [1, 2, 3], ANSWER), Counter[int]()
    expected = world.good.post("/v1/completions", json=body).json()["choices"]
    engine, before = served.running.engine, world.quarantine()
    config, tensors = good(*WIDTHS)
    stream = AnswerStream(world.good, {**body, "max_tokens": 1500})
    for fields, more in ENDED_ENGINES:
        answer = world.upload({**config, **fields}, {**tensors, **more})
        assert answer.status_code == 400 and answer.json()["error"]["message"], (fields, answer.text[:300])
        if fields:
            answer = ask_for_job(world.bad, served, DATA, SHORT, peft={"peft_type": "LORA", **fields})
            assert answer.status_code == 400, (fields, answer.text[:300])
    for seed in range(TRIED):
        what = write_hostile(tmp_path / str(seed), seed, *WIDTHS)
        files = [tmp_path / str(seed) / f"adapter_{name}" for name in ("config.json", "model.safetensors")]
        if all(file.is_file() and not file.is_symlink() for file in files):
            answer = world.send(*(file.read_bytes() for file in files))
            assert answer.status_code in (200, 400, 429), (seed, what, answer.text[:300])
            became[answer.status_code] += 1
    print(f"over HTTP: {len(ENDED_ENGINES)} that ended engines once, {TRIED} drawn: {dict(became)}")
    assert became[200] and became[400] > TRIED / 3
    assert served.running.engine == engine and world.quarantine() == before
    assert len(stream.whole()) > 0 and stream.is_whole
    assert world.good.post("/v1/completions", json=body).json()["choices"] == expected
