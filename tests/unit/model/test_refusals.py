"""Refusals of models: one sentence about every type that transformers knows, without names of its code."""

import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coserve.errors import ModelError, ModelNotFound, UnsupportedModel
from coserve.model.load import load_base
from coserve.model.refusal import refusing
from coserve_benchmarks.models import shrunk
from models import save, tiny

# Names of classes, modules and exceptions, dumps of shapes.
CODE = re.compile(
    r"\b[A-Za-z0-9]*[a-z0-9][A-Z][A-Za-z]*|\w+\.\w+\.\w+|<class|Traceback|Error|Exception|__|Size\("
    r"|\(\d+, \d+|\[\d+, \d+"
)
LONGEST = 300


def check(text: str, name: str) -> None:
    said = text.replace("the error", "")
    assert not (found := CODE.search(said)), (found, text)
    assert len(text) <= LONGEST, text
    assert name in text, text
    ends = "; use ", "until then use ", "layer by layer"
    assert "\n" not in text and any(end in text for end in ends), text


def refusal_of_folder(name: str, folder: Path) -> str:
    """Reason to refuse a folder with a configuration of this type and nothing else."""
    try:
        CONFIG_MAPPING[name]().save_pretrained(folder)
    except Exception:  # no default configuration is valid
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ModelError) as refused:
        load_base(folder)
    return str(refused.value)


def check_folder(name: str, folder: Path) -> None:
    """Types of other models than language models are refused by their configurations; of language models the
    weights are lacking here."""
    text = refusal_of_folder(name, folder)
    name = json.loads((folder / "config.json").read_text())["model_type"]
    if text.startswith(f"{str(folder)!r} holds no weights"):
        assert name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in shrunk.MULTIMODAL
        return
    check(text.replace(str(folder), ""), name)


def check_built(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = shrunk.build(name)
        except Exception:  # of transformers' own: there is no model to try
            return
        try:
            load_base(model)
        except UnsupportedModel as refused:
            check(str(refused), name)


OTHERS = sorted({*CONFIG_MAPPING.keys()} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
NAMED = ("axk2", "deepseek_v32", "longcat_flash", "bert", "zaya", "lfm3", "git")  # by reasons that were false


def test_every_kind_of_refusal_is_a_sentence(tmp_path: Path) -> None:
    """Of a sample of types, drawn anew each time."""
    for number, name in enumerate((*random.sample(OTHERS, 12), "llava", "t5", "nemotron_h", "bart")):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_folder(name, folder)
    for name in (*NAMED, *random.sample((*shrunk.NAMES, *shrunk.MULTIMODAL), 4)):
        check_built(name)


@pytest.mark.slow
def test_every_type_is_served_or_refused_in_a_sentence(tmp_path: Path) -> None:
    for number, name in enumerate((*OTHERS, *shrunk.NAMES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_folder(name, folder)
    for name in (*shrunk.NAMES, *shrunk.MULTIMODAL):
        check_built(name)


GRANITE = {"model_type": "llama", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}, "_name_or_path": "maker/seven"},
         r"saved quantized \(gptq, 3 bits\).*serve maker/seven, which it names, with --quantize"),
        ({"quantization_config": {"quant_method": "eetq", "bits": 8}, "_name_or_path": "/home/some/model"},
         r"\(eetq, 8 bits\).*serve a checkpoint of it that is not quantized with --quantize"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
         r"\(compressed-tensors\)"),
        ({"compression_config": {"quant_method": "sparseml"}}, r"\(sparseml\)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"4 bits"),
        ({"text_config": {"quantization_config": {"quant_method": "torchao"}}}, r"\(torchao\)"),
        ({"quantization_config": {"quant_method": 7, "bits": "many"}}, r"\(7\)"),
        ({"quantization_config": [1]}, r"saved quantized"),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_is_refused_with_its_form(
    saved: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE | saved))
    with pytest.raises(UnsupportedModel, match=said) as refused:
        load_base(tmp_path)
    check(str(refused.value).replace("serve", "; use "), "llama")


def test_the_card_names_what_a_quantized_model_was_made_of(tmp_path: Path) -> None:
    fields = GRANITE | {"quantization_config": {"quant_method": "awq", "bits": 3}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model:\n- maker/seven-b\n---\n")
    with pytest.raises(UnsupportedModel, match="serve maker/seven-b, which it names, with --quantize 4bit"):
        load_base(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it has no config.json"),
        ("{", "a config.json that is no JSON"),
        ("[" * 100_000, "a config.json that is no JSON"),
        ("[]", "a config.json that names no model_type"),
        ('{"model_type": "teapot"}', "names the type 'teapot', which transformers does not know"),
        ('{"model_type": "llama"}', "holds no weights"),
    ],
)
def test_what_is_no_configuration_is_said(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=said) as refused:
        load_base(tmp_path)
    assert not CODE.search(str(refused.value).replace(str(tmp_path), "")), str(refused.value)


def test_fields_of_another_kind_are_said(tmp_path: Path) -> None:
    save(tiny("llama"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": "wide"}))
    with pytest.raises(ModelNotFound, match="none of its type 'llama'") as refused:
        load_base(tmp_path)
    assert not CODE.search(str(refused.value).replace(str(tmp_path), "")), str(refused.value)


def test_a_package_that_transformers_lacks_is_named() -> None:
    said = "\nSomeWrapperModel requires the timm library but it was not found in your environment."
    named = pytest.raises(UnsupportedModel, match=r"gemma3n cannot be loaded: .*; use pip install timm")
    with named, refusing("gemma3n", "cannot be loaded"):
        raise ImportError(said)
