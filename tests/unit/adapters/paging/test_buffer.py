"""Files into memory that is used again: the library's own reader is the oracle."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.adapters.files import WEIGHTS
from coserve.adapters.paging.buffer import Buffer
from coserve.errors import AdapterError
from paged import METHODS, make_engine, stored


def saved(folder: Path, *types: torch.dtype, rows: int = 3) -> Path:
    generator = torch.Generator().manual_seed(rows)
    tensors = {f"t{i}": torch.randn(rows + i, 5, generator=generator).to(t) for i, t in enumerate(types)}
    save_file({**tensors, "none": torch.empty(0, 4), "one": torch.tensor(2.5)}, folder / "a.safetensors")
    return folder / "a.safetensors"


def test_tensors_are_those_that_the_library_reads(tmp_path: Path) -> None:
    buffer = Buffer()
    for rows in (40, 3, 70):
        file = saved(tmp_path, torch.float32, torch.bfloat16, torch.float16, torch.float64, rows=rows)
        found, expected = buffer.read(file), load_file(file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_read_does_not_change_with_the_next_file(method: str, tmp_path: Path) -> None:
    engine, buffer = make_engine(), Buffer()
    base = engine.base
    folders = [stored(engine, tmp_path / str(seed), METHODS[method], seed) for seed in (1, 2)]
    versions = [engine.adapters.look_at("a", folder) for folder in folders]
    first = versions[0].read(base, base.dtype, base.device, buffer)
    before = {name: tensor.clone() for name, tensor in first.parameters().items()}
    second = versions[1].read(base, base.dtype, base.device, buffer)
    assert all(torch.equal(first.parameters()[name], tensor) for name, tensor in before.items())
    assert not all(torch.equal(second.parameters()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("length", [0, 4, 60, -1])
def test_a_file_that_ends_too_early_is_refused(length: int, tmp_path: Path) -> None:
    file, buffer = saved(tmp_path, torch.float32), Buffer()
    buffer.read(file)
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    with pytest.raises(AdapterError, match="no safetensors file any more"):
        buffer.read(file)
    with pytest.raises(AdapterError, match="cannot be read"):
        buffer.read(tmp_path / WEIGHTS)
