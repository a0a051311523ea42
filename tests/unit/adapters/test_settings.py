"""Plain fields become settings, in PEFT's words or ours."""

from typing import Any

import pytest

from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.settings import left_untrained, settings_of
from coserve.errors import AdapterError, ConfigError
from coserve.model.load import load_base
from models import tiny


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj"], "rslora": True},
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"],
         "use_rslora": True},
        {"r": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj"], "use_rslora": True},
    ],
)  # fmt: skip
def test_both_vocabularies(fields: dict[str, Any]) -> None:
    assert settings_of(fields) == (LoRAConfig(4, 8.0, 0.1, ("q_proj",), True),)


def test_nothing_is_lora_and_a_list_is_one_adapter() -> None:
    assert settings_of({}) == (LoRAConfig(),)
    assert settings_of({"target_modules": "all-linear"}) == (LoRAConfig(),)
    assert settings_of([{"r": 2}, {"r": 3}]) == (LoRAConfig(rank=2), LoRAConfig(rank=3))


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"rnk": 4}, ConfigError, "'rnk'; did you mean 'rank'"),
        ({"r": 4, "rank": 4}, ConfigError, "rank twice"),
        ({"r": "four"}, ConfigError, "rank"),
        ({"r": 0}, AdapterError, "rank"),
        ({"type": "lore"}, AdapterError, "'lore'"),
        ({"peft_type": "LORE"}, AdapterError, "'LORE'"),
        ({"type": "lora", "peft_type": "LORA"}, ConfigError, "either"),
        ({"type": ["lora"]}, AdapterError, "lora"),
        ({"target_parameters": "experts.down_proj"}, ConfigError, "parameters"),
        ([], ConfigError, "at least one"),
        ([{"r": 2}, {"rnk": 2}], ConfigError, r"peft\.1"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        settings_of(fields)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("mixtral", {"target_modules": "all-linear"}, "3 modules such as model.layers.0.mlp.experts"),
        ("mixtral", {}, "untrained"),
        ("mixtral", {"type": "ia3", "targets": []}, "LoRA reaches them by name"),
        ("mixtral", {"targets": ["q_proj"]}, ""),
        ("mixtral", [{}, {"type": "bottleneck"}], ""),
        ("mixtral", {"type": "bitfit"}, ""),
        ("llama", {"target_modules": "all-linear"}, ""),
    ],
)
def test_experts_that_all_linears_do_not_reach_are_named(name: str, fields: Any, said: str) -> None:
    found = left_untrained(load_base(tiny(name)), settings_of(fields))
    assert said in found if said else not found
