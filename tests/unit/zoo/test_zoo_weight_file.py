"""Files of safetensors as bytes, whole or refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.errors import ZooError
from coserve.zoo.weight_file import StoredTensor, header_of, open_weight_file


def test_a_file_is_read_as_safetensors_wrote_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    content = open_weight_file(tmp_path / "w.safetensors")
    assert content.metadata == {"format": "pt"}
    assert set(content.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert content.tensors[name].shape == tuple(tensor.shape)
        assert bytes(content.tensors[name].data) == tensor.flatten().view(torch.uint8).numpy().tobytes()
    whole = content.header + b"".join(bytes(one.data) for one in content.tensors.values())
    assert whole == (tmp_path / "w.safetensors").read_bytes()


def test_a_header_of_our_own_is_read_by_safetensors(tmp_path: Path) -> None:
    data = memoryview(struct.pack("<4f", 1, 2, 3, 4))
    header = header_of({"x": StoredTensor("F32", (2, 2), data)}, {"parent": "p"})
    (tmp_path / "x.safetensors").write_bytes(header + data)
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [[1, 2], [3, 4]]


def written(path: Path, fields: Any, data: bytes) -> Path:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7)),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(9)),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
        ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        ({"a": 3}, b""),
        ([], b""),
        (b"{", b""),
        (b"[" * 100_000, b""),
    ],
)
def test_what_is_no_whole_file_is_refused(tmp_path: Path, fields: Any, data: bytes) -> None:
    with pytest.raises(ZooError, match="no whole file of safetensors"):
        open_weight_file(written(tmp_path / "w.safetensors", fields, data))


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, struct.pack("<Q", 50) + b"{}"])
def test_a_header_that_is_cut_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ZooError, match="safetensors"):
        open_weight_file(tmp_path / "w.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"no file .*gone\.safetensors"):
        open_weight_file(tmp_path / "gone.safetensors")
