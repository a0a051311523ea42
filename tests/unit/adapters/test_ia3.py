"""IA3: the linears that it scales, the side of each, and refused settings. `tests/equivalence` compares
numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import IA3Config as PeftIA3Config
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Dense, Part, Place, Side
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.ia3 import IA3, IA3Bypass, IA3Config
from coserve.adapters.settings import settings_of
from coserve.errors import AdapterError, AdapterMismatch
from models import edit_config, tiny


def fresh(name: str, config: IA3Config = IA3Config()) -> Part:
    return IA3().fresh(config, WholeModel(tiny(name)), torch.Generator())


def sides(part: Part) -> dict[str, Side]:
    return {place.path: place.side for place in part.bypasses}


def endings(part: Part, side: Side) -> set[str]:
    return {".".join(path.split(".")[-2:]) for path, found in sides(part).items() if found is side}


@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [
        ("llama", {"self_attn.k_proj", "self_attn.v_proj"}, {"mlp.down_proj"}),
        ("gemma2", {"self_attn.k_proj", "self_attn.v_proj"}, {"mlp.down_proj"}),
        ("gpt2", {"attn.c_attn"}, {"mlp.c_proj"}),
        ("gpt_neox", {"attention.query_key_value"}, {"mlp.dense_4h_to_h"}),
        ("phi3", {"self_attn.qkv_proj"}, {"mlp.down_proj"}),
        ("opt", {"self_attn.k_proj", "self_attn.v_proj"}, {"0.fc2", "1.fc2", "2.fc2"}),
        ("mixtral", {"self_attn.k_proj", "self_attn.v_proj"}, set()),  # its experts are no linears
        ("deepseek_v3", {"self_attn.kv_b_proj"}, {"mlp.down_proj", "shared_experts.down_proj"}),
        ("starcoder2", {"self_attn.k_proj", "self_attn.v_proj"}, {"mlp.c_proj"}),
    ],
)
def test_without_targets_it_scales_what_the_paper_does(
    name: str, outputs: set[str], inputs: set[str]
) -> None:
    part = fresh(name)
    assert endings(part, Side.OUTPUT) == outputs and endings(part, Side.INPUT) == inputs


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_neox", "gpt_bigcode", "mixtral"])
def test_where_peft_follows_the_paper_the_defaults_are_the_same(name: str) -> None:
    adapted = get_peft_model(tiny(name), PeftIA3Config(task_type="CAUSAL_LM"))
    theirs = {
        path.removeprefix("base_model.model."): Side.INPUT if module.is_feedforward else Side.OUTPUT
        for path, module in adapted.named_modules()
        if hasattr(module, "ia3_l")
    }
    assert sides(fresh(name)) == theirs


def test_linears_of_unknown_names_are_found_by_where_they_are() -> None:
    model = tiny("llama", num_hidden_layers=1)
    for number, name in enumerate("qkvo"):
        attention = model.model.layers[0].self_attn
        attention.add_module(f"linear_{number}", attention._modules.pop(f"{name}_proj"))
    part = IA3().fresh(IA3Config(), WholeModel(model), torch.Generator())
    assert endings(part, Side.OUTPUT) == {f"self_attn.linear_{number}" for number in range(3)}


def test_targets_and_feedforward_choose() -> None:
    part = fresh("llama", IA3Config(targets=("k_proj", "o_proj"), feedforward=("layers.1.self_attn.o_proj",)))
    assert [place.path for place in part.bypasses if place.side is Side.INPUT] == [
        "model.layers.1.self_attn.o_proj"
    ]
    assert len(part.bypasses) == 6
    everything = fresh("llama", IA3Config(targets=()))
    assert len(everything.bypasses) == 21 and endings(everything, Side.INPUT) == {"mlp.down_proj"}
    assert not endings(fresh("llama", IA3Config(targets=(), feedforward=())), Side.INPUT)
    with pytest.raises(AdapterMismatch, match="up_proj"):
        fresh("llama", IA3Config(targets=("k_proj",), feedforward=("up_proj",)))
    one: Any = "k_proj"
    for name in ("targets", "feedforward", "modules_to_save"):
        with pytest.raises(AdapterError, match="several names"):
            IA3Config(**{name: one})


def test_settings_in_peft_s_words() -> None:
    fields = {"peft_type": "IA3", "target_modules": ["v_proj", "up_proj"], "feedforward_modules": ["up_proj"]}
    assert settings_of(fields) == (IA3Config(("v_proj", "up_proj"), ("up_proj",)),)
    assert settings_of({"type": "ia3", "target_modules": "all-linear"}) == (IA3Config(targets=()),)
    assert settings_of({"type": "ia3"}) == (IA3Config(),)


def test_fresh_vectors_change_nothing() -> None:
    for place, bypass in fresh("gpt2").bypasses.items():
        width = 256 if place.side is Side.INPUT else 192
        y = torch.randn(3, width)
        assert torch.equal(bypass.add(y, y), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_is_the_same(dtype: torch.dtype) -> None:
    bypass = IA3Bypass(1 + 0.1 * torch.randn(8))
    x, y = torch.randn(3, 4).to(dtype), torch.randn(3, 8).to(dtype)
    wanted, exact = bypass.add(x, y), y.double() * bypass.scales.double()
    assert torch.allclose(wanted.double(), exact, rtol=2 * torch.finfo(dtype).eps)
    bypass.add_(x, y)
    assert y.dtype == wanted.dtype == dtype and torch.equal(y, wanted)


def test_in_low_precision_the_change_is_rounded_and_not_the_scale() -> None:
    """1.005 in bfloat16 would be 1.0078; over many values it is 1.005."""
    y = torch.linspace(1, 2, 4096).bfloat16()[:, None]
    bypass = IA3Bypass(torch.tensor([1.005]))
    assert float((bypass.add(y, y).double() / y.double()).mean()) == pytest.approx(1.005, abs=1e-3)


def test_merged_weights() -> None:
    weight, bias, scales, x = (torch.randn(shape).double() for shape in ((5, 3), (5,), (5,), (2, 3)))
    dense = Dense(weight, bias)
    after = IA3Bypass(scales).merged(dense, Side.OUTPUT)
    assert torch.allclose(F.linear(x, after.weight, after.bias), F.linear(x, weight, bias) * scales)
    before = IA3Bypass(scales[:3]).merged(dense, Side.INPUT)
    assert torch.allclose(F.linear(x, before.weight, before.bias), F.linear(x * scales[:3], weight, bias))
    assert IA3Bypass(scales).merged(Dense(dense.weight, None), Side.OUTPUT).bias is None


FRAME = WholeModel(tiny("llama"))
V0 = "base_model.model.model.layers.0.self_attn.v_proj.ia3_l"
DOWN0 = "base_model.model.model.layers.0.mlp.down_proj.ia3_l"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(AdapterVersion("a", 0, (fresh("llama"),)), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "shape"),
    [(V0, (1, 32)), (V0, (32,)), (V0, (64, 1)), (DOWN0, (64,)), (DOWN0, (1, 64)), (V0, (32, 2)), (DOWN0, ())],
)
def test_shapes_that_do_not_fit_are_named(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape)}, file)
    with pytest.raises(AdapterMismatch, match=r"ia3_l is \(") as error:
        read_adapter(folder, "a", FRAME, torch.float32, torch.device("cpu"))
    assert name.split(".")[-2] in str(error.value) and str(shape) in str(error.value)


def test_a_tensor_that_is_missing(folder: Path) -> None:
    """By the lists in the file, as PEFT reads them: names, endings or paths, and exceptions."""

    def read() -> AdapterVersion:
        return read_adapter(folder, "a", FRAME, torch.float32, torch.device("cpu"))

    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({name: t for name, t in whole.items() if name != V0}, file)
    for targets in (None, ["k_proj", "v_proj"], ["layers.0.self_attn.v_proj"]):
        if targets is not None:
            edit_config(folder, target_modules=targets, feedforward_modules=[])
        with pytest.raises(AdapterMismatch, match=rf"{V0} is missing"):
            read()
    edit_config(
        folder,
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        exclude_modules=["layers.0.self_attn.v_proj"],
    )
    assert len(read().parts[0].bypasses) == 8


def test_what_is_written_is_read_again(folder: Path) -> None:
    again = read_adapter(folder, "a", FRAME, torch.float32, torch.device("cpu"))
    assert sides(again.parts[0]) == sides(fresh("llama"))
    assert Place("model.layers.0.mlp.down_proj", Side.INPUT) in again.parts[0].bypasses
