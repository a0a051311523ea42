"""Surrogates predict beside the blocks of real workers: what is wrong is undone, and reaches no answer."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clusters import cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, SamplingParams
from coserve.adapters.saved import PREFIX
from coserve.cluster.ahead import Speculator
from models import prompts, save, tiny

pytestmark = pytest.mark.local
SETTINGS: dict[str, Any] = {"page_size": 8, "cache_tokens": 512, "approximation_delay": 1e9}
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
QUESTIONS = prompts(random.Random(3), [5, 14, 8])
LINEARS = {"gate_proj": "outputs", "up_proj": "outputs", "down_proj": "inputs"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three blocks of two layers; beside it surrogates of the first two blocks, which keep all
    neurons: `near` as they are, `far` with other weights."""
    folder = tmp_path_factory.mktemp("speculated")
    whole = tiny("llama", torch.float32, num_hidden_layers=6)
    weights = whole.state_dict()
    for name, strength in (("near", 0.0), ("far", 5.0)):
        tensors, kept = {}, {}
        for layer in (1, 2):
            for linear, side in LINEARS.items():
                path = f"model.layers.{layer}.mlp.{linear}"
                weight = weights[f"{path}.weight"]
                kept[path] = {side: list(range(len(weight) if side == "outputs" else weight.shape[1]))}
                tensors[f"{PREFIX}{path}.weight"] = weight + strength * torch.randn_like(weight)
        (folder / name).mkdir()
        save_file(tensors, folder / name / "adapter_model.safetensors", {"format": "pt"})
        fields = {"peft_type": "LN_TUNING", "task_type": "CAUSAL_LM", "target_modules": []}
        fields |= {"modules_to_save": sorted(kept), "kept_units": kept}
        (folder / name / "adapter_config.json").write_text(json.dumps(fields))
    save(whole, folder / "model")
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    engine = Engine(model / "model", EngineConfig(calibrate=False, **SETTINGS))
    asked = [engine.generate(question, None, SAMPLING) for question in QUESTIONS]
    engine.run()
    return [list(one.result().tokens) for one in asked]


@contextmanager
def speculating(model: Path, patch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Engine, list[Any]]]:
    with hosts(folder, 3) as workers:
        addresses = [worker.address for worker in workers]
        settings = {"cluster_speculation": 1.0, **SETTINGS}
        with cluster_engine(model / "model", addresses, patch, **settings) as engine:
            for name in ("near", "far"):
                engine.adapters.load(name, model / name)
            yield engine, workers


def ask(engine: Engine, *alternatives: str) -> list[list[int]]:
    asked = [engine.generate(q, None, SAMPLING, alternatives=alternatives) for q in QUESTIONS]
    engine.run()
    return [list(one.result().tokens) for one in asked]


def test_right_predictions_count_and_wrong_ones_are_undone(
    model: Path, wanted: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that allow no approximation have none. Verifications come in any order with predictions, and
    some before them, so how many there are is the machine's."""
    with speculating(model, monkeypatch, tmp_path / "w") as (engine, workers):
        front = front_of(engine)
        assert ask(engine) == wanted and (front.right, front.wrong) == (0, 0)
        assert ask(engine, "near") == wanted and front.right and front.wrong == 0
        right = front.right
        assert ask(engine, "far") == wanted and front.right == right and front.wrong
        for worker in workers:
            assert not worker._speculator._held and not worker._speculator._predictions


def test_a_worker_dies_with_rows_that_are_held(
    model: Path, wanted: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speculating(model, monkeypatch, tmp_path / "w") as (engine, workers):
        came, deaths = Speculator.came, list[int]()

        def come_and_die(speculator: Speculator, message: Any) -> None:
            came(speculator, message)
            at = [worker._speculator for worker in workers].index(speculator)
            if message.segments[0].context > 16 and not deaths:
                deaths.append(at)
                for peer in list(workers[at]._peers):
                    peer.close()

        monkeypatch.setattr(Speculator, "came", come_and_die)
        assert ask(engine, "near") == wanted and deaths
