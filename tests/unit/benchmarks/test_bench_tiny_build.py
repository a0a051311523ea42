"""The training loop on a very small scale: it resumes where it stopped, and exports what loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coserve_benchmarks.tiny import build
from coserve_benchmarks.tiny.curve import draw
from coserve_benchmarks.tiny.evaluate import load


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The recipe, shrunk to a second of work; the thread count of the test run is left alone."""
    sizes = {"LAYERS": 1, "HIDDEN": 32, "FEED_FORWARD": 32, "HEADS": 2, "KEY_VALUE_HEADS": 1, "STEPS": 4}
    run = {"STEP_TOKENS": 1024, "MICRO_TOKENS": 512, "LOG_EVERY": 1, "CHECKPOINT_EVERY": 2, "WARMUP_STEPS": 1}
    for name, value in (sizes | run).items():
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return monkeypatch


def test_a_resumed_run_ends_where_a_whole_run_ends(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.train(tmp_path / "whole", workers=2)

    class Stop(Exception):
        """Ends the first run after its checkpoint."""

    real = build.step_rows

    def stopping(encoder: build.Encoder, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 2:
            raise Stop
        return real(encoder, step)

    small.setattr(build, "step_rows", stopping)
    with pytest.raises(Stop):
        build.train(tmp_path / "parts", workers=1)
    small.setattr(build, "step_rows", real)
    build.train(tmp_path / "parts", workers=2)
    for name in ("whole", "parts"):
        build.export(tmp_path / name, tmp_path / f"{name}-out")
        build.export(tmp_path / name, tmp_path / f"{name}-out")  # a second export replaces the first
    one, two = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.allclose(one[key].float(), two[key].float(), atol=2e-2) for key in one)
    logs = [
        json.loads((tmp_path / f"{name}-out" / "loss.json").read_text())["log"] for name in ("whole", "parts")
    ]
    assert [row["step"] for row in logs[0]] == [row["step"] for row in logs[1]] == [1, 2, 3, 4]
    assert logs[0][-1]["held_out_loss"] == pytest.approx(logs[1][-1]["held_out_loss"], rel=1e-2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "parts-out", "whole", "whole-out"]
    model, tokenizer = load(tmp_path / "whole-out")
    assert model.config.vocab_size == len(tokenizer)
    draw(logs[0], tmp_path / "loss.svg")
    assert "<svg" in (tmp_path / "loss.svg").read_text()


def test_the_rate_rises_holds_and_falls() -> None:
    rates = [build.learning_rate(step) for step in range(build.STEPS)]
    assert rates[0] < rates[build.WARMUP_STEPS] == build.PEAK_RATE == max(rates)
    middle = (build.COOL_FROM + build.STEPS) // 2
    assert rates[middle] == pytest.approx(build.PEAK_RATE / 2, rel=0.01)
    assert rates[-1] == build.LOWEST_RATE == min(rates[build.WARMUP_STEPS :])


def test_plain_attention_is_causal_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mine, _ = build.causal_attention(torch.nn.Identity(), query, key, value, None)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    assert torch.allclose(mine, theirs.transpose(1, 2), atol=1e-5)
