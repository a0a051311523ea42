"""`coserve adapters check`: folders, without a server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from coserve import Engine, EngineConfig, LoRAConfig
from models import save, tiny

Run = Callable[..., Result]


def exported(folder: Path, config: LoRAConfig) -> str:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64))
    return str(engine.open_training("mine", config).save_weights(folder).result())


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(save(tiny("llama"), tmp_path / "base"))


def test_an_adapter_that_goes_elsewhere(run: Run, base: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "good", LoRAConfig(rank=32))
    own, peft, vllm = run("adapters", "check", folder, "--model", base).stdout.splitlines()
    assert own == "coserve reads it"
    assert peft.startswith("PEFT 0.") and peft.endswith("reads it")
    assert vllm == "vLLM reads it, with --max-lora-rank 32"


def test_an_adapter_that_does_not(run: Run, base: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "dora", LoRAConfig(rank=4, dora=True))
    told = run("adapters", "check", folder, "--model", base, "--json", fails=True)
    assert told.exit_code == 1
    own, peft, vllm = json.loads(told.stdout)
    assert not own["problems"] and not peft["problems"] and "has no DoRA" in vllm["problems"]
