"""PEFT's adapter files: what is read, what is written, and every refusal by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import lora_adapter
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.elsewhere import check_vllm
from coserve.adapters.files import read_adapter, read_outline, write_adapter
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.lora import LoRAConfig
from coserve.errors import AdapterError, AdapterMismatch
from coserve.serve.adapter_registry.imports import copy_adapter
from models import edit_config, tiny, with_lora

FRAME = WholeModel(tiny("llama"))
SHAPES = {
    f"model.layers.{i}.self_attn.{p}_proj": (32 if p in "kv" else 64, 64) for i in range(3) for p in "qkvo"
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    with_lora(tiny("llama"), seed=0, r=3, target_modules=["q_proj", "v_proj"]).save_pretrained(str(folder))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes((original / file).read_bytes())
    return tmp_path


def read(folder: Path) -> AdapterVersion:
    return read_adapter(folder, "mine", FRAME, torch.float32, torch.device("cpu"))


def edit_tensors(folder: Path, remove: str | None = None, **changes: torch.Tensor) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): t for name, t in changes.items()}}
    save_file({name: t for name, t in tensors.items() if name != remove}, file)


def refusal(folder: Path, kind: type[AdapterError] = AdapterError) -> str:
    with pytest.raises(AdapterError) as error:
        read(folder)
    assert type(error.value) is kind
    return str(error.value)


def test_reads_what_peft_wrote(folder: Path) -> None:
    adapter = read(folder)
    assert adapter.key == "mine@0"
    assert adapter.parts[0].config == LoRAConfig(rank=3, alpha=6.0)
    assert set(adapter.bypasses.outputs) == {
        f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qv"
    }
    tensors = load_file(folder / "adapter_model.safetensors")
    bypass = adapter.bypasses.outputs["model.layers.0.self_attn.q_proj"]
    assert torch.equal(bypass.a, tensors[f"{Q0}.lora_A.weight"])
    assert torch.equal(bypass.b, tensors[f"{Q0}.lora_B.weight"])
    assert bypass.scale == 2.0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    config = LoRAConfig(rank=2, alpha=5.0, dropout=0.25, rslora=True)
    bypasses = {
        path: LoRABypass(
            torch.randn(2, inside, generator=generator),
            torch.randn(out, 2, generator=generator),
            config.at([path]).scale(path, 2),
        )
        for path, (out, inside) in list(SHAPES.items())[:5]
    }
    write_adapter(lora_adapter("a", 7, config, bypasses), tmp_path / "new" / "folder", "some/base")
    again = read(tmp_path / "new" / "folder")
    assert again.parts[0].config == config and again.bypasses.outputs.keys() == bypasses.keys()
    for path, bypass in bypasses.items():
        assert torch.equal(again.bypasses.outputs[path].a, bypass.a) and torch.equal(
            again.bypasses.outputs[path].b, bypass.b
        )
        assert again.bypasses.outputs[path].scale == pytest.approx(bypass.scale)
    fields = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == "some/base"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", {"lm_head": [1, 2]}),
        ("layer_replication", [[0, 2]]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"num_groups": 2}),
        ("of_a_later_version", 0.5),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused_by_name(folder: Path, field: str, value: object) -> None:
    edit_config(folder, **{field: value})
    sentence = refusal(folder)
    assert field in sentence and "not supported" in sentence and str(folder) in sentence


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_replication": [[0, 2]]}, "stacks the base's layers anew.*serve the merged model"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal.*train without use_bdlora"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "save the base as LoftQ left it"),
        ({"init_lora_weights": "unheard"}, "no way to begin that is known here: eva, gaussian"),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "train without it"),
        ({"r": 10**18}, "r=10{18} is too large"),
        ({"r": 20_000}, "rank of 1 to 16384, not 20000"),
        ({"rank_pattern": {"q_proj": 10**18}}, "rank of 1 to 16384"),
        ({"lora_alpha": 10**18}, "lora_alpha=10{18} is too large"),
        ({"layers_to_transform": [10**18]}, "chooses no module of the base"),
    ],
)
def test_what_to_do_is_said(folder: Path, fields: dict[str, object], said: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(AdapterError, match=said) as error:
        read(folder)
    assert len(str(error.value)) < 600


def test_all_linear_means_experts_too(tmp_path: Path) -> None:
    """In PEFT, of a model whose experts are one tensor, which get no adapters here."""
    model = tiny("mixtral")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with_lora(tiny("mixtral"), seed=0, target_modules=targets).save_pretrained(str(tmp_path))
    read_adapter(tmp_path, "a", WholeModel(model), torch.float32, torch.device("cpu"))
    edit_config(tmp_path, target_modules="all-linear")
    with pytest.raises(AdapterMismatch, match=r"means the experts of this model too .*list the modules"):
        read_adapter(tmp_path, "a", WholeModel(model), torch.float32, torch.device("cpu"))


def test_a_pickle_is_told_as_one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file, target = folder / "adapter_model.safetensors", tmp_path_factory.mktemp("copies") / "copy"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "pickle under another name" in refusal(folder) and "adapters convert" in refusal(folder)
    file.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in refusal(folder) and "adapters convert" in refusal(folder)
    with pytest.raises(AdapterError, match=r"^adapter_model.bin is a pickle"):
        copy_adapter(folder, target, 10**6)
    with pytest.raises(AdapterError, match=r"adapter_model.bin is a pickle"):
        check_vllm(folder, ())


def test_float8_is_refused_by_name(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    edit_tensors(folder, **{name.replace(".", "__"): tensors[name].to(torch.float8_e4m3fn)})
    assert "holds float8_e4m3fn" in refusal(folder, AdapterMismatch)
    with pytest.raises(AdapterMismatch, match="holds float8_e4m3fn"):
        read_outline(folder, "mine", FRAME, torch.float32)


@pytest.mark.parametrize("kind", ["BOFT", "XLORA", "ia3", None, 3])
def test_other_methods_are_refused(folder: Path, kind: object) -> None:
    edit_config(folder, peft_type=kind)
    assert repr(kind) in refusal(folder)


@pytest.mark.parametrize("name", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga"])
def test_adapters_that_changed_their_base_are_refused(folder: Path, name: str) -> None:
    edit_config(folder, init_lora_weights=name)
    assert name in refusal(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"), ("", "cannot be read"), ("[]", "no configuration"),
        ('"LORA"', "no configuration"),
    ],
)  # fmt: skip
def test_malformed_configurations(folder: Path, text: str, said: str) -> None:
    (folder / "adapter_config.json").write_text(text)
    assert said in refusal(folder)


def test_bytes_that_are_no_text(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe{}")
    assert "adapter_config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "8"), ("lora_alpha", None), ("lora_alpha", "x"), ("r", 2.5), ("r", True), ("lora_dropout", "x"),
        ("lora_dropout", True),
    ],
)  # fmt: skip
def test_numbers_that_are_none(folder: Path, field: str, value: object) -> None:
    edit_config(folder, **{field: value})
    assert repr(value) in refusal(folder)


def test_rank_zero_and_bad_dropout(folder: Path) -> None:
    edit_config(folder, r=0)
    assert "rank" in refusal(folder)
    edit_config(folder, r=3, lora_dropout=1.5)
    assert "dropout" in refusal(folder)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_lead_to_no_number(folder: Path, field: str) -> None:
    edit_config(folder, **{field: {"q_proj": "two"}})
    assert "'two'" in refusal(folder)


def test_whole_numbers_are_no_weights(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, f"{Q0}.lora_A.weight": torch.ones(3, 64, dtype=torch.int8)}, file)
    sentence = refusal(folder, AdapterMismatch)
    assert f"{Q0}.lora_A.weight" in sentence and "int8" in sentence


def test_a_rank_that_is_not_the_matrices_own(folder: Path) -> None:
    """Whoever edited either meant another scale."""
    edit_config(folder, r=5)
    assert "of rank 3, and its configuration says 5" in refusal(folder, AdapterMismatch)
    edit_config(folder, rank_pattern={"q_proj": 3, "v_proj": 3})
    assert read(folder).bypasses.outputs["model.layers.0.self_attn.q_proj"].scale == 2.0


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(folder)


def test_corrupt_weights(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for spoilt in (b"", b"not safetensors at all", whole[: len(whole) // 2], b"\xff" * 8 + whole[8:]):
        file.write_bytes(spoilt)
        assert "adapter_model.safetensors" in refusal(folder)


def test_no_matrices(folder: Path) -> None:
    save_file({}, folder / "adapter_model.safetensors")
    assert "no tensors of its LORA adapter" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
        f"{Q0}.lora_magnitude_vector",
        f"{Q0}.lora_B.bias",
        f"{Q0}.base_layer.bias",
        f"{Q0}.lora_C.weight",
        f"{Q0}.base_layer.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_that_would_go_unused_is_named(folder: Path, name: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(3, 64)}, file)
    sentence = refusal(folder, AdapterMismatch)
    assert name in sentence and "(3, 64)" in sentence and "unused" in sentence


@pytest.mark.parametrize("letter", "AB")
def test_half_a_pair_is_missing(folder: Path, letter: str) -> None:
    edit_tensors(folder, remove=f"{Q0}.lora_{letter}.weight")
    sentence = refusal(folder, AdapterMismatch)
    assert f"{Q0}.lora_{letter}.weight is missing" in sentence


@pytest.mark.parametrize(
    ("letter", "shape"), [("A", (3, 60)), ("B", (61, 3)), ("B", (64, 2)), ("A", (0, 64))]
)
def test_shapes_that_do_not_fit_are_both_named(folder: Path, letter: str, shape: tuple[int, int]) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), f"{Q0}.lora_{letter}.weight": torch.zeros(shape)}, file)
    sentence = refusal(folder, AdapterMismatch)
    assert "model.layers.0.self_attn.q_proj" in sentence
    assert "64 -> 64" in sentence and str(shape) in sentence


def test_an_adapter_for_another_base(tmp_path: Path) -> None:
    """Shapes named where linears are called the same, the linear where it is not there."""
    with_lora(tiny("llama", hidden_size=32), 0, target_modules=["v_proj"]).save_pretrained(
        str(tmp_path / "smaller")
    )
    sentence = refusal(tmp_path / "smaller", AdapterMismatch)
    assert "64 -> 32" in sentence and "(4, 32)" in sentence
    with_lora(tiny("gpt2"), 0).save_pretrained(str(tmp_path / "gpt2"))
    sentence = refusal(tmp_path / "gpt2", AdapterMismatch)
    assert "transformer.h." in sentence and "chooses no module of the base" in sentence
    with_lora(tiny("llama", num_hidden_layers=4), 0, target_modules=["q_proj"]).save_pretrained(
        str(tmp_path / "deep")
    )
    assert "model.layers.3.self_attn.q_proj" in refusal(tmp_path / "deep", AdapterMismatch)


def test_no_code_hides_in_weights(folder: Path) -> None:
    """A pickled file is not looked at, even where it is the only one."""
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert "adapter_model.safetensors" in refusal(folder)


@pytest.mark.parametrize("field", ["dora", "lora_bias"])
def test_what_peft_has_not_beside_weights_is_warned_of(
    field: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def adapter(path: str, **settings: bool) -> AdapterVersion:
        bypass = LoRABypass(torch.zeros(2, 8), torch.zeros(8, 2), 1.0)
        return lora_adapter("mine", 0, LoRAConfig(rank=2, **settings), {f"model.layers.0.{path}": bypass})

    write_adapter(adapter("mlp.up_proj"), tmp_path, model_type="deepseek_v3")
    write_adapter(adapter("mlp.up_proj", **{field: True}), tmp_path, model_type="llama")
    write_adapter(adapter("mlp.up_proj", **{field: True}), tmp_path, model_type="deepseek_v3", whole=True)
    write_adapter(adapter("self_attn.q_a_proj", **{field: True}), tmp_path, model_type="deepseek_v3")
    assert not recwarn.list
    with pytest.warns(UserWarning, match=f"model.layers.0.mlp.up_proj of deepseek_v3.* no [a-z_]*{field}"):
        write_adapter(adapter("mlp.up_proj", **{field: True}), tmp_path, model_type="deepseek_v3")
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_weights_of_linears_are_targets_that_must_be_there(folder: Path) -> None:
    edit_config(folder, target_modules=["v_proj"], target_parameters=["q_proj.weight"])
    assert len(read(folder).bypasses.outputs) == 6
    edit_config(folder, target_parameters=["q_proj.weight", "layers.0.mlp.up_proj.weight"])
    assert "model.layers.0.mlp.up_proj" in refusal(folder, AdapterMismatch)
    for name in ("q_proj", "norm.weight", "experts.down_proj.weight"):
        edit_config(folder, target_parameters=["q_proj.weight", name])
        assert "target_parameters" in refusal(folder) and "merge_and_unload" in refusal(folder)
