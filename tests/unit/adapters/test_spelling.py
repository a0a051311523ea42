"""Names of an adapter's file as those of the base at hand."""

from typing import Any

import pytest
import torch

from coserve.adapters.sites import Modules
from coserve.adapters.spelling import renaming_of, with_own_names
from coserve.errors import AdapterMismatch

LINEARS = [f"layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkv"]
SPELLINGS = (
    ("model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
    ("model.text_model", "lm_head"),
)


def modules(decoder: str, head: str) -> Modules:
    paths = (decoder, *(f"{decoder}.{name}" for name in LINEARS), f"{decoder}.norm", head)
    linears = frozenset(f"{decoder}.{name}" for name in LINEARS)
    return Modules(paths, linears, frozenset(), (), decoder, head)


def tensor_names(decoder: str, head: str) -> list[str]:
    return [
        *(f"base_model.model.{decoder}.{name}.lora_A.weight" for name in LINEARS),
        f"base_model.model.{head}.lora_A.weight",
    ]


@pytest.mark.parametrize("base", SPELLINGS)
@pytest.mark.parametrize("file", SPELLINGS)
def test_tensors_and_fields_get_the_names_of_the_base(file: tuple[str, str], base: tuple[str, str]) -> None:
    decoder, head = file
    fields: dict[str, Any] = {
        "r": 4,
        "task_type": "CAUSAL_LM",
        "target_modules": [f"{decoder}.{LINEARS[0]}", "k_proj", head, "layers.2.self_attn.v_proj"],
        "exclude_modules": rf"{decoder.replace('.', '[.]')}\.layers\.[01]\..*k_proj",
        "modules_to_save": [f"{decoder}.norm"],
        "rank_pattern": {f"^{decoder}.{LINEARS[3]}$": 7, "never": 1},
        "alpha_pattern": {"v_proj": 3},
        "layers_to_transform": [0, 1],
    }
    tensors = {name: torch.zeros(1) for name in tensor_names(*file)}
    found, named = with_own_names("folder", fields, tensors, modules(*base))
    assert list(named) == tensor_names(*base)
    if file == base:
        assert found is fields
        return
    assert found["target_modules"] == [
        f"{base[0]}.{LINEARS[0]}",
        "k_proj",
        base[1],
        "layers.2.self_attn.v_proj",
    ]
    excluded = [f"{base[0]}.layers.{layer}.self_attn.k_proj" for layer in (0, 1)]
    assert found["exclude_modules"] == excluded
    assert found["modules_to_save"] == [f"{base[0]}.norm"]
    own = f"{base[0]}.{LINEARS[3]}".replace(".", r"\.")
    assert found["rank_pattern"] == {f"^{own}$": 7}
    assert found["alpha_pattern"] == {"v_proj": 3}  # which gives the same modules something
    assert (found["r"], found["layers_to_transform"]) == (4, [0, 1])


def test_endings_that_peft_shortened_lose_what_is_before_the_layers() -> None:
    """They stay endings: a restriction to layers goes by that."""
    own = modules("model", "lm_head")
    fields = {
        "target_modules": ["language_model.layers.0.self_attn.q_proj"],
        "modules_to_save": ["language_model.norm"],
    }
    found, _ = with_own_names("", fields, dict.fromkeys(tensor_names(*SPELLINGS[1]), torch.zeros(1)), own)
    assert found["target_modules"] == ["layers.0.self_attn.q_proj"]
    assert found["modules_to_save"] == ["model.norm"]


def test_other_models_and_virtual_tokens_are_left_alone() -> None:
    assert renaming_of(tensor_names("model", "lm_head"), modules("transformer", "lm_head")) is None
    assert renaming_of(["prompt_embeddings"], modules("model.language_model", "lm_head")) is None
    alone = ["base_model.model.lm_head.lora_A.weight"]
    assert renaming_of(alone, modules("model.language_model", "lm_head")) is None


def test_one_tensor_by_two_names_is_refused() -> None:
    names = [tensor_names(*spelling)[0] for spelling in SPELLINGS[:2]]
    with pytest.raises(AdapterMismatch, match="is there twice"):
        with_own_names("folder", {}, dict.fromkeys(names, torch.zeros(1)), modules(*SPELLINGS[0]))


def test_a_head_alone_is_found() -> None:
    name = "base_model.model.language_model.lm_head.lora_A.weight"
    renaming = renaming_of([name], modules("model", "lm_head"))
    assert renaming is not None and renaming.tensor(name) == "base_model.model.lm_head.lora_A.weight"
