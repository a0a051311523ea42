"""The example method of `docs/methods.md`, word for word, put beside the others: it trains, is served and
saved, and no file of coserve's knows of it."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coserve.adapters.methods as package
from coserve import LoRAConfig, TrainingConfig
from coserve.adapters.settings import settings_of
from methods import SMALL, case_of, engine_of, forward_errors, served, windowed_errors
from mixed import make_examples
from models import Exact, tiny
from plain import Plain

DOCUMENT = Path(__file__).parents[2] / "docs" / "methods.md"
PROMPT = [5, 9, 2, 14, 3, 3, 18]


def example() -> str:
    (found,) = re.finditer(r"```python\n(\"\"\"LayerScale.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return found[1]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a file among the methods."""
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "layer_scale.py").write_text(example())
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    _forget_methods()
    yield importlib.import_module("coserve.adapters.methods.layer_scale")
    del sys.modules["coserve.adapters.methods.layer_scale"]
    delattr(package, "layer_scale")
    _forget_methods()


def _forget_methods() -> None:
    package.methods.cache_clear()
    package.readers.cache_clear()


def test_it_is_short_and_nothing_lists_it() -> None:
    assert len(example().splitlines()) < 60
    assert "layer_scale" not in package.methods()
    assert not [f for f in Path(package.__file__).parents[2].rglob("*.py") if "layer_scale" in f.read_text()]


@pytest.mark.local
def test_it_trains_and_is_served(added: Any, tmp_path: Path) -> None:
    """Beside a job and answers of another method, and as one part of two."""
    (config,) = settings_of({"type": "layer_scale", "start": 0.25})
    assert config == added.LayerScaleConfig(0.25)
    engine = engine_of("llama", vocab_size=SMALL)
    training = TrainingConfig(learning_rate=3e-2, batch_size=2, epochs=8, warmup_ratio=0.0)
    data = make_examples("documented")
    job = engine.finetune(data, "mine", config, training)
    other = engine.finetune(data, "both", [added.LayerScaleConfig(), LoRAConfig(rank=2)], training)
    for handle in (job, other):
        handle.result()
        assert handle.status == "succeeded"
        assert handle.history[-1].loss < 0.9 * handle.history[0].loss
    for name in ("mine", "both"):
        answers = served(engine, PROMPT, name)
        assert float((answers - served(engine, PROMPT, None)).abs().max()) > 1e-2
        engine.adapters.save(name, tmp_path / name)
        again = engine_of("llama", vocab_size=SMALL)
        again.adapters.load("again", tmp_path / name)
        assert float((served(again, PROMPT, "again") - answers).abs().max()) <= 1e-5


def oracle(dtype: torch.dtype, **changes: Any) -> Plain:
    model = tiny("llama", dtype, **changes).requires_grad_(False)
    model.set_attn_implementation("eager")
    trainable = {}
    for path, module in model.named_modules():
        if path.endswith(("self_attn", "mlp")):
            gains = nn.Parameter(torch.linspace(-0.3, 0.3, 64, dtype=dtype))
            module.register_forward_hook(_scaling(gains))
            trainable[f"base_model.model.{path}.gains"] = gains
    return Plain(model, {"peft_type": "MY_LAYER_SCALE"}, trainable)


def _scaling(gains: nn.Parameter) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output * (1 + gains)
        return (output[0] * (1 + gains), *output[1:])

    return hook


@pytest.mark.local
def test_it_is_as_right_as_the_others(added: Any, tmp_path: Path) -> None:
    error, without = forward_errors("llama", oracle(torch.float32, vocab_size=SMALL), tmp_path)
    assert error <= 1 and without > 1e-2
    with Exact():
        plain = oracle(torch.float64)
        plain.save_pretrained(tmp_path)
        errors = windowed_errors(case_of("llama", plain, tmp_path, plain.trainable))
    assert max(errors.values()) <= 1e-10, errors
