"""LN tuning: the modules that it trains, and refused settings. `tests/equivalence` compares numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LNTuningConfig as PeftLNTuningConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.ln_tuning import LNTuning, LNTuningConfig
from coserve.adapters.settings import settings_of
from coserve.errors import AdapterError, AdapterMismatch
from models import edit_config, logits_of, tiny


def read(folder: Path, name: str = "gpt2") -> AdapterVersion:
    return read_adapter(folder, "mine", WholeModel(tiny(name)), torch.float32, torch.device("cpu"))


@pytest.fixture
def theirs(tmp_path: Path) -> PeftModel:
    """Norms of each layer, and (another way to say the same) the last one."""
    fields: Any = {"target_modules": ["ln_1"], "modules_to_save": ["ln_f"]}
    adapted = get_peft_model(tiny("gpt2"), PeftLNTuningConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * parameter.requires_grad)
    adapted.save_pretrained(str(tmp_path))
    return adapted.eval()


def test_without_targets_every_norm_trains() -> None:
    model = tiny("gpt2")
    part = LNTuning().fresh(LNTuningConfig(), WholeModel(model), torch.Generator())
    assert {place.path for place in part.bypasses} == {p for p, _ in model.named_modules() if "ln_" in p}
    for place, bypass in part.bypasses.items():
        own = model.get_submodule(place.path)
        assert torch.equal(bypass.parameters()["weight"], own.weight)
        assert bypass.parameters()["weight"] is not own.weight


def test_settings_in_peft_s_words() -> None:
    assert settings_of({"peft_type": "LN_TUNING", "target_modules": ["norm"]}) == (LNTuningConfig(("norm",)),)
    one: Any = "norm"
    for name in ("targets", "modules_to_save"):
        with pytest.raises(AdapterError, match="several names"):
            LNTuningConfig(**{name: one})
    with pytest.raises(AdapterMismatch, match="nothing"):
        LNTuning().fresh(LNTuningConfig(("nothing",)), WholeModel(tiny("gpt2")), torch.Generator())


def test_modules_to_save_are_written_as_targets(theirs: PeftModel, tmp_path: Path) -> None:
    write_adapter(read(tmp_path), tmp_path / "mine")
    assert "base_model.model.transformer.ln_f.ln_tuning_layers.bias" in load_file(
        tmp_path / "mine" / "adapter_model.safetensors"
    )
    again = PeftModel.from_pretrained(tiny("gpt2"), str(tmp_path / "mine")).eval()
    assert torch.equal(logits_of(again, [5, 9, 2]), logits_of(theirs, [5, 9, 2]))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_half_a_norm_is_missing(kind: str, theirs: PeftModel, tmp_path: Path) -> None:
    name = f"base_model.model.transformer.h.0.ln_1.ln_tuning_layers.{kind}"
    file = tmp_path / "adapter_model.safetensors"
    save_file({n: tensor for n, tensor in load_file(file).items() if n != name}, file)
    with pytest.raises(AdapterMismatch, match=f"{name} is missing"):
        read(tmp_path)


def test_a_target_without_tensors_and_another_base_are_refused(theirs: PeftModel, tmp_path: Path) -> None:
    edit_config(tmp_path, target_modules=["ln_1", "h.1.ln_2"])
    with pytest.raises(AdapterMismatch, match=r"h\.1\.ln_2.* are missing"):
        read(tmp_path)
    with pytest.raises(AdapterMismatch, match="chooses no module"):
        read(tmp_path, "llama")
