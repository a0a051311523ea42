"""`coserve finetune --base`: an adapter is trained without a server, on linears of a base executor."""

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.files import read_adapter
from coserve.cli.app import app
from models import save, tiny
from split_served import differences, serving


def test_an_adapter_is_trained_and_written(tmp_path: Path) -> None:
    """The one that a local engine trains, which loads the folder; wrong flags are refused before."""
    model, data, output = save(tiny("llama"), tmp_path / "model"), tmp_path / "t.jsonl", tmp_path / "mine"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": f" {i}"}) + "\n" for i in range(4)))
    flags = ["--epochs", "1", "--batch-size", "2", "--seed", "7", "--optimizer", "learning_rate=0.01"]
    options = [
        "finetune",
        str(data),
        "--model",
        str(model),
        "--output",
        str(output),
        "--peft",
        "rank=3",
        *flags,
    ]
    with serving(tiny("llama"), tmp_path) as served:
        for wrong in (["--base", served.address, "--detach"], []):
            refused = CliRunner().invoke(app, [*options, *wrong])
            assert refused.exit_code and not output.exists()
        done = CliRunner().invoke(app, [*options, "--base", served.address])
        assert done.exit_code == 0, done.output
    assert "step 1/2" in done.output and "step 2/2" in done.output and str(output) in done.output
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=512))
    training = TrainingConfig(epochs=1, batch_size=2, learning_rate=0.01, seed=7)
    engine.finetune(data, "local", LoRAConfig(rank=3), training).result()
    base = engine.base
    read = read_adapter(output, "mine", base, base.dtype, base.device)
    found, wanted = read.parameters(), engine.weights("local").parameters()
    assert max(differences(found, wanted).values()) < 1e-4
    assert any(float(x.abs().max()) > 1e-3 for name, x in wanted.items() if name.endswith("lora_B"))
    assert all(torch.isfinite(x).all() for x in found.values())
