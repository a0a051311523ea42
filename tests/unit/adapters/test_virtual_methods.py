"""Methods with virtual tokens: how they begin, what files hold of them, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Part
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.methods import method_of
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixLayout, PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.virtual import Given, Prompt
from coserve.errors import AdapterError, AdapterMismatch
from coserve.model.base import Base
from coserve.model.load import load_base
from models import edit_config, tiny
from virtual import KINDS, encoder_of, own_logits, with_virtual

SETTINGS = {
    "prefix": PrefixTuningConfig(7),
    "projected prefix": PrefixTuningConfig(6, projection=True, hidden=24),
    "prompt": PromptTuningConfig(9),
    "p-tuning": PTuningConfig(5, hidden=20),
    "p-tuning by LSTM": PTuningConfig(4, encoder="LSTM", hidden=12),
}
ENCODED = [kind for kind in KINDS if " " in kind or kind == "p-tuning"]


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(tiny("qwen3"))


def fresh(config: object, base: Base, seed: int = 0) -> Part:
    return method_of(config).fresh(config, base, torch.Generator().manual_seed(seed))


def read(folder: Path, base: Base) -> AdapterVersion:
    return read_adapter(folder, "mine", base, torch.float32, torch.device("cpu"))


def written(kind: str, folder: Path) -> Path:
    with torch.no_grad():
        with_virtual(tiny("qwen3"), kind).save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fresh_is_drawn_as_peft_draws_it(kind: str, base: Base) -> None:
    """The same shapes; normal embeddings, and everything else uniform within the same bounds."""
    adapted = encoder_of(with_virtual(tiny("qwen3"), kind))
    drawn = {
        name.partition(".")[2].partition(".")[2]: t for name, t in fresh(SETTINGS[kind], base).parameters()
    }
    if len(drawn) == 1:
        adapted = {"prompt_embeddings": adapted["embedding.weight"]}
    assert {n: t.shape for n, t in drawn.items()} == {n: t.shape for n, t in adapted.items()}
    for name, tensor in drawn.items():
        if "embedding" in name:
            assert float(tensor.std()) == pytest.approx(1.0, abs=0.15) and float(tensor.abs().max()) > 2.0
        else:
            most, theirs = float(tensor.abs().max()), float(adapted[name].detach().abs().max())
            assert most == pytest.approx(theirs, rel=0.25)


def test_prompts_may_start_from_a_text_or_the_vocabulary(base: Base) -> None:
    words = base.model.get_input_embeddings().weight
    (prompt,) = fresh(PromptTuningConfig(5, text=(3, 9)), base).bypasses.values()
    assert isinstance(prompt, Prompt) and torch.equal(prompt.rows(), words[[3, 9, 3, 9, 3]])
    (prompt,) = fresh(PromptTuningConfig(6, start="SAMPLE_VOCAB"), base).bypasses.values()
    assert isinstance(prompt, Prompt)
    assert bool((prompt.rows()[:, None] == words).all(-1).any(-1).all())
    with pytest.raises(AdapterError, match="token 96 is not one of the model's 96"):
        fresh(PromptTuningConfig(5, text=(96,)), base)


@pytest.mark.parametrize("projection", [False, True])
def test_a_prefix_may_start_from_zeros(projection: bool, base: Base) -> None:
    (prefix,) = fresh(PrefixTuningConfig(3, projection, zero=True), base).bypasses.values()
    assert isinstance(prefix, Given)
    assert all(not tensor.any() for pair in prefix.caches() for tensor in pair)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (PrefixTuningConfig, {"tokens": 0}),
        (PrefixTuningConfig, {"hidden": -1}),
        (PromptTuningConfig, {"tokens": 2.0}),
        (PromptTuningConfig, {"start": "TEXT"}),
        (PromptTuningConfig, {"text": "words"}),
        (PTuningConfig, {"encoder": "GRU"}),
        (PTuningConfig, {"layers": 0}),
    ],
)
def test_settings_that_mean_nothing(config: type, fields: dict[str, object]) -> None:
    with pytest.raises(AdapterError):
        config(**fields)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_s_files_are_read_and_written_again(kind: str, base: Base, tmp_path: Path) -> None:
    """PEFT gives the same answers from our files as from its own."""
    adapter = read(written(kind, tmp_path / "theirs"), base)
    assert adapter.parts[0].method == method_of(SETTINGS[kind]).name
    assert bool(next(iter(adapter.placed()))[1].note) is (kind in ENCODED)
    write_adapter(adapter, tmp_path / "ours")
    tensors = [load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "ours")]
    assert tensors[0].keys() == tensors[1].keys() == {"prompt_embeddings"}
    assert torch.equal(tensors[0]["prompt_embeddings"], tensors[1]["prompt_embeddings"])
    again = PeftModel.from_pretrained(tiny("qwen3"), str(tmp_path / "ours")).eval()
    with torch.no_grad():
        wanted, found = (own_logits(m, [4, 8, 2]) for m in (with_virtual(tiny("qwen3"), kind), again))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ENCODED)
def test_an_encoder_stays_in_what_coserve_keeps_for_itself(kind: str, base: Base, tmp_path: Path) -> None:
    """PEFT takes no notice of it, and an export has none."""
    adapter = AdapterVersion("mine", 0, (fresh(SETTINGS[kind], base),))
    write_adapter(adapter, tmp_path / "whole", whole=True)
    write_adapter(adapter, tmp_path / "export")
    again = read(tmp_path / "whole", base)
    mine, theirs = adapter.parameters(), again.parameters()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert again.parts[0].config == SETTINGS[kind] and not next(iter(again.placed()))[1].note
    assert len(load_file(tmp_path / "export" / "adapter_model.safetensors")) == 1
    models = [
        PeftModel.from_pretrained(tiny("qwen3"), str(tmp_path / name)).eval() for name in ("whole", "export")
    ]
    with torch.no_grad():
        whole, export = (own_logits(model, [4, 8, 2]) for model in models)
    assert torch.equal(whole, export)


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("prefix", {"num_transformer_submodules": 2}, AdapterError, "encoder and a decoder"),
        ("prompt", {"num_layers": 5}, AdapterError, "num_layers=5, and the base has 3"),
        ("prompt", {"num_virtual_tokens": 4}, AdapterMismatch, r"prompt_embeddings is \(9, 64\)"),
        ("prefix", {"num_virtual_tokens": 4}, AdapterMismatch, r"prompt_embeddings is \(7, 192\)"),
        ("prompt", {"num_virtual_tokens": 0}, AdapterError, "1 to 65536, not 0"),
        ("prompt", {"num_virtual_tokens": 10**18}, AdapterError, "too large"),
        ("prompt", {"token_dim": 32}, AdapterError, "token_dim=32, and the base has 64"),
        ("prefix", {"token_dim": 64, "num_attention_heads": 4}, AdapterError, "and the base has"),
        ("prefix", {"token_dim": None, "num_attention_heads": 4}, AdapterError, "belong together"),
        ("p-tuning", {"something_new": 1}, AdapterError, "something_new"),
    ],
)
def test_files_that_are_refused(
    kind: str, change: dict[str, object], error: type[AdapterError], message: str, base: Base, tmp_path: Path
) -> None:
    edit_config(written(kind, tmp_path), **change)
    with pytest.raises(error, match=message):
        read(tmp_path, base)


@pytest.mark.parametrize("kind", ["prefix", "prompt", "p-tuning"])
def test_tensors_that_are_missing_misshapen_or_left_over(kind: str, base: Base, tmp_path: Path) -> None:
    file = written(kind, tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({"other": tensors["prompt_embeddings"]}, file)
    with pytest.raises(AdapterMismatch, match="prompt_embeddings is missing"):
        read(tmp_path, base)
    save_file({"prompt_embeddings": tensors["prompt_embeddings"][:, :-1].contiguous()}, file)
    with pytest.raises(AdapterMismatch, match="prompt_embeddings is"):
        read(tmp_path, base)
    save_file({**tensors, "more": tensors["prompt_embeddings"].clone()}, file)
    with pytest.raises(AdapterMismatch, match="'more'"):
        read(tmp_path, base)


def test_an_encoder_of_another_shape_or_with_a_gap_is_refused(base: Base, tmp_path: Path) -> None:
    adapter = AdapterVersion("mine", 0, (fresh(SETTINGS["p-tuning"], base),))
    write_adapter(adapter, tmp_path, whole=True)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != "encoder.mlp_head.2.bias"}, file)
    with pytest.raises(AdapterMismatch, match=r"mlp_head\.2\.bias is missing"):
        read(tmp_path, base)
    save_file({**tensors, "encoder.mlp_head.2.bias": torch.zeros(3)}, file)
    with pytest.raises(AdapterMismatch, match=r"mlp_head\.2\.bias is \(3,\)"):
        read(tmp_path, base)

    save_file({**tensors, "encoder.mlp_head.6.bias": torch.zeros(3)}, file)
    with pytest.raises(AdapterMismatch, match=r"mlp_head\.6\.bias.* would go unused"):
        read(tmp_path, base)


def test_a_prefix_needs_keys_and_values_of_one_shape() -> None:
    """DeepSeek's values are narrower than its keys."""
    with pytest.raises(AdapterMismatch, match="one shape"):
        PrefixLayout.of(load_base(tiny("deepseek_v3")))


def test_the_layout_of_a_row_is_peft_s(base: Base) -> None:
    layout = PrefixLayout.of(base)
    rows = torch.randn(5, layout.row_width)
    theirs = rows.view(1, 5, layout.layers * 2, layout.groups, layout.width).permute(2, 0, 3, 1, 4).split(2)
    for (k, v), pair in zip(layout.caches(rows), theirs, strict=True):
        assert torch.equal(k, pair[0][0]) and torch.equal(v, pair[1][0])


def test_what_is_exported_names_the_method(base: Base, tmp_path: Path) -> None:
    for kind, config in SETTINGS.items():
        write_adapter(AdapterVersion("mine", 0, (fresh(config, base),)), tmp_path / kind)
        fields = json.loads((tmp_path / kind / "adapter_config.json").read_text())
        assert fields["peft_type"] == method_of(config).peft_type
        assert fields["num_virtual_tokens"] == config.tokens  # type: ignore[attr-defined]
