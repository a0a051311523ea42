"""`coserve serve --zoo` from outside: two foundations and a full fine-tune of one, on one port."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from coserve import Datum, Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.sites import linear_names
from coserve.cli.app import app
from coserve.core.training import AdamParams
from whole_server import PATIENCE, Server, until
from zoo_made import make_fine_tune, make_model

ATTEMPTS = 10  # to have the places of an engine filled while two answers are under way
TOKENS = (5, 6, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another foundation: wider, with weights of its own."""
    return make_model(tmp_path_factory.mktemp("further") / "wide", seed=3, hidden_size=96)


@pytest.fixture(scope="module")
def server(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A zoo of `base`, `near`, a full fine-tune of it with a ladder of chains, and `wide`. A request that
    waits at all is load; three run at once."""
    folder = tmp_path_factory.mktemp("served")
    base = make_model(folder / "base", max_position_embeddings=512)
    near = make_fine_tune(folder / "near", base, {"layers": 0.01})
    (folder / "text").write_text("the cats sat on the mats and ate " * 4)
    how = ("--chains", "2", "--text", str(folder / "text"), "--window", "16")
    for command in (
        ("add", str(base)), ("add", str(wide)), ("add", str(near), "--parent", "base"),
        ("approximate", "near", *how),
    ):  # fmt: skip
        ran = CliRunner().invoke(app, ["zoo", *command, "--zoo", str(folder / "zoo")], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
    made = Server(
        folder, "--zoo", str(folder / "zoo"), COSERVE_ENGINE_MAX_RUNNING="3",
        COSERVE_ENGINE_APPROXIMATION_DELAY="0", COSERVE_ENGINE_DTYPE="float32",
    )  # fmt: skip
    yield made
    made.end()


async def under_load(url: str) -> tuple[list[str], list[str]]:
    """Chains that two answers of `near` tell, the first one whole and the other one in a stream, when the
    places beside them are taken and requests wait."""
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    near = {**body, "model": "near", "adaptive": True}
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=near))
        choices: list[dict[str, Any]] = []
        crowd: list[asyncio.Task[Any]] = []
        async with http.stream("POST", "/v1/completions", json={**near, "stream": True}) as streamed:
            async for line in streamed.aiter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line[6:])["choices"]
                    others = {**body, "model": "base", "max_tokens": 100}
                    for _ in range(0 if crowd else 3):
                        crowd.append(asyncio.create_task(http.post("/v1/completions", json=others)))
        whole = [choice["chain"] for choice in (await first).json()["choices"]]
        assert all("chain" not in choice for choice in choices[:-1]), "the last chunk tells"
        for other in crowd:
            assert "chain" not in (await other).json()["choices"][0], "the foundation has no other"
        return whole, [choices[-1]["chain"]]


def test_answers_change_their_chain_under_load_and_tell(server: Server) -> None:
    """Should the machine stop the server alone for so long that the first two have ended, they are exact."""
    for _ in range(ATTEMPTS):
        whole, streamed = asyncio.run(under_load(server.url))
        if (whole, streamed) != (["exact"], ["exact"]):
            break
    assert whole == streamed == ["exact > near~4"], "the foundation, the only chain that is in memory"


def test_a_run_on_a_further_foundation_goes_on_after_the_engine_s_death(server: Server, wide: Path) -> None:
    """Losses are those of an engine that has the foundation alone."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-unused") as service:
        listed = {one.model_name: one for one in service.get_server_capabilities().supported_models}
        assert list(listed) == ["base", "wide", "near"]
        with pytest.raises(tinker.NotFoundError, match="This server trains 'base' and 'wide', not 'near'"):
            service.create_lora_training_client(base_model="near").result()
        runs = {
            base: service.create_lora_training_client(base_model=base, rank=4, seed=1).result()
            for base in ("wide", "base")
        }
        losses: dict[str, list[float]] = {base: [] for base in runs}
        inputs = {"target_tokens": [*TOKENS[1:]], "weights": [1.0] * (len(TOKENS) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints([*TOKENS[:-1]]), loss_fn_inputs=inputs)
        for step in range(4):
            if step == 2:
                until(server.stands_by, "an engine standing by")
                os.kill(server.pid_of("coserve.engine.process"), signal.SIGKILL)
            passes = {base: run.forward_backward([datum], "cross_entropy") for base, run in runs.items()}
            steps = [run.optim_step(types.AdamParams(learning_rate=1e-2)) for run in runs.values()]
            for base, passed in passes.items():
                losses[base].append(passed.result().metrics["loss:sum"])
            assert all(stepped.result().metrics for stepped in steps)
        sampler = runs["wide"].save_weights_and_get_sampling_client().result()
        greedy = types.SamplingParams(max_tokens=3, temperature=0.0)
        assert sampler.sample(types.ModelInput.from_ints([5, 6]), 1, greedy).result().sequences[0].tokens
    assert losses["wide"] == pytest.approx(alone(wide, 4), rel=1e-4)
    assert losses["base"] != pytest.approx(losses["wide"], rel=1e-2)


def alone(model: Path, steps: int) -> list[float]:
    """Losses of the same steps on a model alone."""
    engine = Engine(str(model), EngineConfig(calibrate=False, cache_tokens=256, dtype="float32"))
    names = linear_names(engine.base.sites, engine.base.depth)
    lora = LoRAConfig(rank=4, alpha=32, targets=tuple(name for part in names.values() for name in part))
    client = engine.open_training("alone", lora, TrainingConfig(seed=1, rows=256))
    losses = []
    for _ in range(steps):
        passed = client.forward_backward([Datum(TOKENS[:-1], TOKENS[1:])])
        client.optim_step(AdamParams(1e-2)).result()
        losses.append(passed.result().loss)
    return losses
