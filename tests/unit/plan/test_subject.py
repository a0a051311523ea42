"""Models described by their configuration and the headers of their files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coserve.errors import ConfigError, ModelNotFound
from coserve.plan.subject import read_subject, subject_from_fields

FIELDS = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}


def test_a_file_and_a_folder_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FIELDS))
    (read, folder) = read_subject(file), read_subject(tmp_path)
    assert read.config.n_embd == folder.config.n_embd == 32
    assert (read.folder, folder.folder) == (None, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_is_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    """By their headers, when the configuration does not say; most numbers decide."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    save_file({"a": torch.zeros(100, dtype=dtype), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert read_subject(tmp_path).dtype is dtype
    assert read_subject(tmp_path, "float32").dtype is torch.float32
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "dtype": "float32"}))
    assert read_subject(tmp_path).dtype is torch.float32, "what the configuration says is what is loaded"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model_type": "nothing"}', '{"model_type": "gpt2", "n_layer": "x"}']
)
def test_what_is_no_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match="configuration"):
        read_subject(tmp_path)


def test_what_is_no_safetensors_file_and_no_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "model.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0nope")
    with pytest.raises(ModelNotFound, match="safetensors"):
        read_subject(tmp_path)
    with pytest.raises(ConfigError, match="dtype"):
        subject_from_fields("small", FIELDS, "int4")
