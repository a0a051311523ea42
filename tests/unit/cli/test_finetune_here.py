"""`coserve finetune --base`: an adapter is trained without a server, on linears of a base executor."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.files import read_adapter
from coserve.cli.app import app
from coserve.engine.scoring import LossScoring
from forked_executors import fork_executors
from models import save, tiny
from split_served import differences, serving

FLAGS = ["--batch-size", "2", "--seed", "7", "--optimizer", "learning_rate=0.01", "--peft", "rank=3"]
TRAINING = TrainingConfig(epochs=1, batch_size=2, learning_rate=0.01, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("base") / "model")


def written(file: Path, records: Sequence[Mapping[str, object]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def check_adapter(engine: Engine, output: Path, wanted: Mapping[str, Tensor]) -> None:
    base = engine.base
    found = read_adapter(output, "mine", base, base.dtype, base.device).parameters()
    assert max(differences(found, wanted).values()) < 1e-4
    assert any(float(x.abs().max()) > 1e-3 for name, x in wanted.items() if name.endswith("lora_B"))
    assert all(torch.isfinite(x).all() for x in found.values())


def test_an_adapter_is_trained_measured_and_written(tmp_path: Path, model: Path) -> None:
    """The one that a local engine trains, whose loss on the validation file is shown after each epoch; wrong
    flags are refused before."""
    output = tmp_path / "mine"
    data = written(tmp_path / "t.jsonl", [{"prompt": f"{i}?", "completion": f" {i}"} for i in range(4)])
    other = written(tmp_path / "v.jsonl", [{"prompt": f"{i}?", "completion": f" {i + 1}"} for i in range(3)])
    measured = ["--validation-file", str(other)]
    options = ["finetune", str(data), "--model", str(model), "--output", str(output), *FLAGS]
    with serving(tiny("llama"), tmp_path) as served:
        base = ["--base", served.address]
        broken = written(tmp_path / "broken.jsonl", [{"prompt": 1}])
        for wrong, reason in (
            ([*base, "--detach"], "--detach: not with --base"),
            ([], "--base or .*--model .* and --output are needed"),
            ([*base, *measured, "--method", "dpo"], "--validation-file is for supervised jobs"),
            ([*base, "--method", "magic"], "no training method 'magic'"),
            ([*base, "--validation-file", str(broken)], "validation .*broken"),
        ):
            refused = CliRunner().invoke(app, [*options, *wrong])
            assert refused.exit_code and not output.exists()
            assert re.search(reason, str(refused.exception)), refused.exception
        asked = [one for one in options if one not in ("--output", str(output))]
        checked = CliRunner().invoke(app, [*asked, *base, *measured, "--epochs", "2", "--check", "--json"])
        assert checked.exit_code == 0, checked.output
        told = json.loads(checked.output)
        assert told["valid"] and told["steps"] == 4 and told["records"]["total"] == 4
        assert told["format"] == "prompts with completions" and told["first_example"][-1]["trained"]
        long = [*asked, *base, "--check", "--max-length", "2"]
        refused = CliRunner().invoke(app, long)
        assert refused.exit_code == 1 and not output.exists()
        assert "refused: 4 of 4 examples are longer than --max-length 2; " in refused.output
        assert "--too-long 'skip' leaves such examples out" in refused.output
        done = CliRunner().invoke(app, [*options, *base, *measured, "--epochs", "2"])
        assert done.exit_code == 0, done.output
    assert "step 1/4" in done.output and "step 4/4" in done.output and str(output) in done.output
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=512))
    losses = {}
    job = engine.finetune(
        data, "local", LoRAConfig(rank=3), TrainingConfig(**{**fields(TRAINING), "epochs": 2})
    )
    for step in job:
        if step.step in (2, 4):
            scoring = LossScoring(engine, step.version, engine.prepare(other).examples)
            while not scoring.advance():
                engine.step()
            losses[step.step] = scoring.result.loss if scoring.result else None
    check_adapter(engine, output, engine.adapters.weights("local").parameters())
    shown = {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d)/4  validation loss (\S+)", done.output)
    }
    assert set(shown) >= {4} and set(shown) <= {2, 3, 4}
    assert shown[4] == pytest.approx(losses[4], abs=2e-3) and losses[4] != pytest.approx(losses[2], abs=1e-2)


@pytest.mark.slow
def test_an_adapter_is_trained_on_ranks(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server and without executors: as a local engine trains it."""
    fork_executors(monkeypatch)
    output = tmp_path / "mine"
    data = written(tmp_path / "t.jsonl", [{"prompt": f"{i}?", "completion": f" {i}"} for i in range(4)])
    asked = ["finetune", str(data), "--model", str(model), "--tensor-parallel", "2", *FLAGS, "--epochs", "1"]
    refused = CliRunner().invoke(app, [*asked, "--output", str(output), "--suffix", "mine"])
    assert str(refused.exception).startswith("--suffix: not with --tensor-parallel")
    done = CliRunner().invoke(app, [*asked, "--output", str(output)])
    assert done.exit_code == 0 and "step 2/2" in done.output, done.output
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=512))
    engine.finetune(data, "local", LoRAConfig(rank=3), TRAINING).result()
    check_adapter(engine, output, engine.adapters.weights("local").parameters())


def fields(training: TrainingConfig) -> dict[str, object]:
    return {name: getattr(training, name) for name in ("epochs", "batch_size", "learning_rate", "seed")}


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_an_adapter_learns_from_pairs(tmp_path: Path, model: Path, method: str) -> None:
    output = tmp_path / "mine"
    pairs = [{"prompt": f"{i}?", "chosen": f" {i}", "rejected": " no"} for i in range(4)]
    data = written(tmp_path / "p.jsonl", pairs)
    with serving(tiny("llama"), tmp_path) as served:
        done = CliRunner().invoke(
            app,
            ["finetune", str(data), "--model", str(model), "--output", str(output), "--base", served.address,
             "--method", method, "--method-option", "beta=0.5", "--epochs", "1", *FLAGS],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "step 2/2" in done.output and "rewards/margins" in done.output
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=512))
    objective = {"type": method, "beta": 0.5}
    engine.finetune(data, "local", LoRAConfig(rank=3), TRAINING, objective=objective).result()
    check_adapter(engine, output, engine.adapters.weights("local").parameters())


def test_an_adapter_learns_from_rewards(tmp_path: Path, model: Path) -> None:
    """Answers are sampled by the same engine on the executor's linears."""
    output = tmp_path / "mine"
    grader = {"type": "string_check", "reference": "{{item.answer}}"}
    (file := tmp_path / "g.json").write_text(json.dumps(grader))
    data = written(tmp_path / "r.jsonl", [{"prompt": f"{i}?", "answer": f"{i}"} for i in range(2)])
    with serving(tiny("llama"), tmp_path) as served:
        done = CliRunner().invoke(
            app,
            ["finetune", str(data), "--model", str(model), "--output", str(output), "--base", served.address,
             "--method", "reinforcement", "--grader", str(file), "--method-option", "group_size=2",
             "--method-option", "max_tokens=4", "--epochs", "1", *FLAGS],
        )  # fmt: skip
        assert served.work["inference"]
    assert done.exit_code == 0, done.output
    assert "step 1/1" in done.output and (output / "adapter_config.json").is_file()
