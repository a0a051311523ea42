"""Adapters that coserve writes, as PEFT and vLLM's rules read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from coserve import Engine, EngineConfig, LoRAConfig
from coserve.adapters.elsewhere import check_adapter, check_peft, check_vllm
from coserve.adapters.files import CONFIG, WEIGHTS
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.errors import AdapterError
from models import save, tiny

LINEARS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "embed_tokens",
    "lm_head",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("elsewhere") / "base")


def exported(folder: Path, *methods: Any) -> Path:
    """A fresh adapter of the tiny model, as coserve exports it."""
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64))
    session = engine.open_training("mine", methods)
    return Path(session.save_weights(folder).result())


@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(rank=4),
        LoRAConfig(rank=24, rslora=True, targets=("q_proj", "down_proj", "embed_tokens")),
    ],
)
def test_what_is_exported_is_read_by_both(config: LoRAConfig, base: Path, tmp_path: Path) -> None:
    own, peft, vllm = check_adapter(exported(tmp_path / "a", config), base)
    assert not own.problems, own
    assert peft.program.startswith("PEFT 0.") and not peft.problems, peft
    assert not vllm.problems, vllm
    assert vllm.notes == (() if config.rank == 4 else ("with --max-lora-rank 32",))


@pytest.mark.parametrize(
    ("methods", "peft_says", "vllm_says"),
    [
        ((LoRAConfig(rank=4, dora=True),), None, "has no DoRA"),
        ((LoRAConfig(rank=4, bias="all"),), None, "takes no bias='all'"),
        ((LoRAConfig(rank=4, modules_to_save=("norm",)),), None, "takes no modules_to_save"),
        ((LoRAConfig(rank=4, rank_pattern={"q_proj": 2}),), None, "ignores rank_pattern"),
        ((LoRAConfig(rank=4, alpha_pattern={"q_proj": 2.0}),), None, "ignores alpha_pattern"),
        ((IA3Config(),), None, "reads LoRA alone, and this is IA3"),
        ((PrefixTuningConfig(4),), None, "reads LoRA alone, and this is PREFIX_TUNING"),
        ((BottleneckConfig(),), "has no type COSERVE_BOTTLENECK", "reads LoRA alone"),
        ((LoRAConfig(rank=2), IA3Config()), "has no type COSERVE_LIST", "reads LoRA alone"),
    ],
)
def test_what_is_beyond_one_of_them_is_named(
    methods: tuple[Any, ...], peft_says: str | None, vllm_says: str, base: Path, tmp_path: Path
) -> None:
    own, peft, vllm = check_adapter(exported(tmp_path / "a", *methods), base)
    assert not own.problems, own
    assert (not peft.problems) if peft_says is None else any(peft_says in one for one in peft.problems), peft
    assert any(vllm_says in one for one in vllm.problems), vllm


def edited(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """An exported LoRA adapter with other fields and tensors; None removes one."""
    exported(folder, LoRAConfig(rank=4, targets=("q_proj",)))
    config, found = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))
    kept = {name: tensor for name, tensor in {**found, **tensors}.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS)
    return folder


def test_tensors_that_a_loader_would_misread_are_named(tmp_path: Path) -> None:
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    odd: dict[str, torch.Tensor | None] = {
        f"{first}.lora_B.weight": None,
        f"{first}.odd": torch.zeros(2),
        "base_model.model.model.layers.0.other.lora_A.weight": torch.zeros(3, 8),
    }
    folder = edited(tmp_path / "a", {"r": 600, "lora_alpha": 8}, odd)
    problems = "\n".join(check_vllm(folder, LINEARS).problems)
    for says in (
        "ranks up to 512, and this has 600",
        f"no use for the tensor {first}.odd",
        "no LoRA on model.layers.0.other",
        "needs lora_A and lora_B of model.layers.0.self_attn.q_proj",
        "takes 600 for the rank of",
    ):
        assert says in problems, problems


def test_a_tensor_that_peft_drops_is_a_problem(tmp_path: Path) -> None:
    model: PreTrainedModel = tiny("llama")
    stray = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 8)}
    report = check_peft(edited(tmp_path / "a", {}, dict(stray)), model)
    assert any("has no place for" in one and "layers.9" in one for one in report.problems), report


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        check_vllm(tmp_path, LINEARS)
