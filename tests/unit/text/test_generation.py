"""Sampling that a model's own file recommends."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from coserve.errors import ConfigError
from coserve.text.generation import OURS, recommended


def test_the_fields_are_those_of_transformers_file(tmp_path: Path) -> None:
    asked = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    GenerationConfig(do_sample=True, max_new_tokens=9, **asked).save_pretrained(tmp_path)
    found = recommended(tmp_path)
    assert {name: getattr(found, name) for name in asked} == asked
    assert found.max_tokens == OURS.max_tokens


def test_what_is_not_said_is_as_without_a_file(tmp_path: Path) -> None:
    assert recommended(tmp_path) == OURS
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4, "top_k": null}')
    assert recommended(tmp_path) == OURS


@pytest.mark.parametrize(
    "given",
    [[], {"top_p": 0}, {"top_k": "x"}, {"temperature": True}, {"temperature": -1}, {"top_k": 1e999}, "{"],
)
def test_what_is_no_sampling_is_refused(tmp_path: Path, given: Any) -> None:
    written = given if isinstance(given, str) else json.dumps(given)
    (tmp_path / "generation_config.json").write_text(written)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        recommended(tmp_path)
