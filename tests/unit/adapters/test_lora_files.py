"""Files of LoRA's variants: required and refused contents."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.lora import LoRA, LoRAConfig
from coserve.errors import AdapterError, AdapterMismatch
from coserve.model.load import load_base
from methods import spread, with_peft
from models import edit_config, tiny

BIASED = {"attention_bias": True}
FRAME = WholeModel(tiny("llama", **BIASED))
PREFIX = "base_model.model."
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def peft_folder(folder: Path, **fields: Any) -> Path:
    """PEFT's folder of an adapter, on q_proj unless the fields say otherwise."""
    config = LoraConfig(task_type="CAUSAL_LM", r=3, **{"target_modules": ["q_proj"], **fields})
    with_peft("llama", config, torch.float32, **BIASED).save_pretrained(str(folder))
    return folder


def edit(folder: Path, without: str = "", **changed: Tensor) -> None:
    """Without some tensor, with others in their places; `__` stands for a dot."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    if without:
        del tensors[without]
    names = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file({**tensors, **names}, file)


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterMismatch) as error:
        read(folder)
    assert str(folder) in str(error.value) or "the base's" in str(error.value)
    return str(error.value)


def read(folder: Path) -> AdapterVersion:
    return read_adapter(folder, "mine", FRAME, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"use_dora": True}, f"{Q0}.lora_magnitude_vector"),
        ({"lora_bias": True}, f"{Q0}.lora_B.bias"),
        ({"bias": "lora_only"}, f"{Q0}.base_layer.bias"),
        ({"bias": "all"}, f"{PREFIX}model.layers.2.self_attn.o_proj.bias"),
        ({"target_modules": ["embed_tokens"]}, f"{PREFIX}model.embed_tokens.lora_embedding_B"),
        ({"modules_to_save": ["lm_head"]}, f"{PREFIX}lm_head.weight"),
        ({"modules_to_save": ["k_proj"]}, f"{PREFIX}model.layers.1.self_attn.k_proj.bias"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, **fields)
    read(folder)
    edit(folder, without=name)
    sentence = refusal(folder)
    path = name.removeprefix(PREFIX).replace(".base_layer.bias", "").replace(".bias", "")
    assert "missing" in sentence and (path in sentence or str(fields["modules_to_save"]) in sentence)


@pytest.mark.parametrize(
    ("fields", "name", "shape"),
    [
        ({"use_dora": True}, f"{Q0}.lora_magnitude_vector", (63,)),
        ({"lora_bias": True}, f"{Q0}.lora_B.bias", (1, 64)),
        ({"bias": "lora_only"}, f"{Q0}.base_layer.bias", (32,)),
        ({"target_modules": ["embed_tokens"]}, f"{PREFIX}model.embed_tokens.lora_embedding_A", (3, 95)),
        ({"target_modules": ["embed_tokens"]}, f"{PREFIX}model.embed_tokens.base_layer.weight", (97, 64)),
        ({"modules_to_save": ["lm_head"]}, f"{PREFIX}lm_head.weight", (64, 96)),
        ({"modules_to_save": ["model.norm"]}, f"{PREFIX}model.norm.weight", (96,)),
    ],
)
def test_what_does_not_fit_is_named(
    fields: dict[str, Any], name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path, **fields)
    edit(folder, **{name.replace(".", "__"): torch.ones(shape)})
    sentence = refusal(folder)
    path = name.removeprefix(PREFIX).rpartition(".")[0].replace(".base_layer", "").replace(".lora_B", "")
    assert path in sentence and str(shape) in sentence


def test_what_the_configuration_does_not_ask_for_is_unused(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, use_dora=True, bias="lora_only", modules_to_save=["model.norm"])
    for field, value, name in (
        ("use_dora", False, "lora_magnitude_vector"),
        ("bias", "none", "base_layer.bias"),
        ("modules_to_save", [], "model.norm.weight"),
    ):
        before = (folder / "adapter_config.json").read_text()
        edit_config(folder, **{field: value})
        sentence = refusal(folder)
        assert name in sentence and "unused" in sentence
        (folder / "adapter_config.json").write_text(before)
    edit(folder, **{f"{PREFIX}lm_head.lora_magnitude_vector".replace(".", "__"): torch.ones(96)})
    assert "lm_head.lora_magnitude_vector" in refusal(folder)


def test_an_embedding_saved_along_must_be_the_base_s_own(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, target_modules=["q_proj", "embed_tokens", "lm_head"])
    names = [f"{PREFIX}{path}.base_layer.weight" for path in ("model.embed_tokens", "lm_head")]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert set(names) <= tensors.keys(), "PEFT saves them unasked"
    assert len(read(folder).bypasses.outputs) == 5
    for name in names:
        other = tensors[name].clone()
        other[3, 4] += 1e-3
        edit(folder, **{name.replace(".", "__"): other})
        assert name in refusal(folder)
        edit(folder, **{name.replace(".", "__"): tensors[name]})


@pytest.mark.parametrize("theirs", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16])
def test_an_embedding_saved_along_may_be_rounded(
    theirs: torch.dtype, ours: torch.dtype, tmp_path: Path
) -> None:
    """A base in float32, on which somebody has trained in 16 bits."""
    tied, targets = {"tie_word_embeddings": True}, ["embed_tokens", "lm_head"]
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=targets)
    oracle = with_peft("llama", config, torch.float32, **tied)
    oracle.to(theirs).save_pretrained(str(tmp_path))
    frame = load_base(tiny("llama", torch.float32, **tied).to(ours))

    def load() -> AdapterVersion:
        return read_adapter(tmp_path, "mine", frame, ours, torch.device("cpu"))

    assert len(load().bypasses.outputs) == 2
    name = f"{PREFIX}lm_head.base_layer.weight"
    own = load_file(tmp_path / "adapter_model.safetensors")[name]
    assert own.dtype == theirs
    other = own.clone()
    other[5, 7] *= 1.03  # four times what two roundings to eight bits allow
    edit(tmp_path, **{name.replace(".", "__"): other})
    with pytest.raises(AdapterMismatch, match=re.escape(name)):
        load()
    edit(tmp_path, **{name.replace(".", "__"): own.float() * 1.01})  # what is exact has to be the same
    with pytest.raises(AdapterMismatch, match=re.escape(name)):
        load()


@pytest.mark.parametrize("names", [["rotary_emb"], ["norm"], ["self_attn"], ["o_proj", "embed_tokens"]])
def test_modules_to_save_mean_what_they_mean_in_peft(names: list[str], tmp_path: Path) -> None:
    """By how paths end, and with all that is in them; a module without weights is missing."""
    targets = ["up_proj"]
    if names == ["rotary_emb"]:
        folder = peft_folder(tmp_path, target_modules=targets)
        edit_config(folder, modules_to_save=names)
        assert "rotary_emb" in refusal(folder)
        return
    folder = peft_folder(tmp_path, target_modules=targets, modules_to_save=names)
    written = {n for n in load_file(folder / "adapter_model.safetensors") if "lora" not in n}
    adapter = read(folder)
    again = {name for name in LoRA().write(adapter.parts[0]).tensors if "lora" not in name}
    assert again == written and written


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dora": True, "lora_bias": True}, "dora and lora_bias"),
        ({"bias": "some"}, "'some'"),
        ({"modules_to_save": "lm_head"}, "several names"),
        ({"lora_bias": True, "targets": ("embed_tokens",)}, "beside an embedding"),
        ({"modules_to_save": ("nothing",)}, "'nothing'"),
        ({"modules_to_save": ("mlp",)}, "'mlp'"),
        ({"targets": ("nothing",)}, "nothing"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(said)):
        LoRA().fresh(LoRAConfig(**fields), FRAME, torch.Generator())


def test_both_a_target_and_replaced(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path)
    edit_config(folder, modules_to_save=["q_proj"])
    weight = {f"{PREFIX}model.layers.{i}.self_attn.q_proj.weight": torch.ones(64, 64) for i in range(3)}
    bias = {name.replace("weight", "bias"): torch.ones(64) for name in weight}
    edit(folder, **{name.replace(".", "__"): tensor for name, tensor in {**weight, **bias}.items()})
    assert "replaced" in refusal(folder)


@pytest.mark.parametrize("targets", [["q_proj", "layers.1.mlp.up_proj"], r".*\.(q_proj|up_proj)"])
def test_a_target_without_tensors_is_missing(targets: list[str] | str, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, target_modules=targets)
    read(folder)
    for letter in "AB":
        edit(folder, without=f"{PREFIX}model.layers.1.mlp.up_proj.lora_{letter}.weight")
    assert "layers.1.mlp.up_proj.lora_B.weight are missing" in refusal(folder)
    edit_config(folder, exclude_modules=["layers.1.mlp.up_proj"])
    read(folder)
    edit_config(folder, exclude_modules=r"(?!.*layers\.[02]).*mlp.*|.*layers\.1.*q_proj")
    assert "layers.1.self_attn.q_proj.lora_A.weight' (3, 64)" in refusal(folder), "excluded, and there"


FRESH: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"dora": True, "rslora": True, "targets": ("q_proj", "embed_tokens", "lm_head"), "dropout": 0.1},
    "biases": {"bias": "all", "lora_bias": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up": 3.0}},
    "own biases": {"bias": "lora_only", "dora": True, "targets": ("k_proj",), "dropout": 0.3},
    "whole": {"targets": ("q_proj",), "modules_to_save": ("lm_head", "norm", "embed_tokens", "k_proj")},
}


@pytest.mark.parametrize("variant", FRESH)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_written_is_read_again(name: str, variant: str, tmp_path: Path) -> None:
    """The same parameters by the same names, bit for bit: checkpoints depend on it."""
    names = {"q_proj": "c_attn", "k_proj": "c_fc", "embed_tokens": "wte", "norm": "ln_f"}
    fields = dict(FRESH[variant])
    for field in ("targets", "modules_to_save"):
        if field in fields and name == "gpt2":
            fields[field] = tuple(names.get(target, target) for target in fields[field])
    changes = {"tie_word_embeddings": False} if name == "gpt2" else BIASED
    frame = WholeModel(tiny(name, **changes))
    part = LoRA().fresh(LoRAConfig(rank=3, **fields), frame, torch.Generator().manual_seed(1))
    adapter = AdapterVersion("mine", 0, (part,))
    parameters = adapter.parameters()
    spread(list(parameters.values()))
    write_adapter(adapter, tmp_path)
    again = read_adapter(tmp_path, "mine", frame, torch.float32, torch.device("cpu"))
    assert again.parameters().keys() == parameters.keys()
    for path, tensor in again.parameters().items():
        assert torch.equal(tensor, parameters[path]), path
    assert {place for place, _ in again.placed()} == set(part.bypasses)
    for place, bypass in again.placed():
        drops = "lora_A" in bypass.parameters()
        assert bypass.dropout == (fields.get("dropout", 0.0) if drops else 0.0), place
