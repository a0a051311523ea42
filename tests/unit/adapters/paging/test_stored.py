"""Stored adapters: their facts without weights, and that the weights read later are the same."""

import os
from pathlib import Path

import pytest
import torch

from coserve import Engine
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import CONFIG, WEIGHTS, read_adapter, read_outline
from coserve.adapters.paging.buffer import Buffer
from coserve.adapters.paging.stored import Outlines
from coserve.adapters.saved import Saved
from coserve.errors import AdapterError, AdapterMismatch
from paged import METHODS, make_engine, stored


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def loaded(engine: Engine, folder: Path) -> AdapterVersion:
    return read_adapter(folder, "a", engine.base, engine.base.dtype, engine.base.device)


@pytest.mark.parametrize("method", METHODS)
def test_an_outline_is_the_adapter_but_for_its_values(engine: Engine, method: str, tmp_path: Path) -> None:
    folder = stored(engine, tmp_path, METHODS[method])
    outline, whole = read_outline(folder, "a", engine.base, torch.bfloat16), loaded(engine, folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.parameters().items()}
    assert {name: tuple(tensor.shape) for name, tensor in outline.parameters().items()} == shapes
    assert all(tensor.is_meta for tensor in outline.parameters().values())
    found = engine.adapters.look_at("a", folder)
    assert found.outline.nbytes == whole.nbytes
    assert found.cost == whole.nbytes + engine.executor.worker.slot_pools.slot_nbytes(whole.bypasses)
    counts = whole.virtual.count, whole.virtual.prompt_count
    assert (found.virtual.count, found.virtual.prompt_count) == counts
    read = found.read(engine.base, engine.base.dtype, engine.base.device)
    assert read.key == found.key == "a@0"
    assert all(torch.equal(read.parameters()[name], tensor) for name, tensor in whole.parameters().items())


def test_weights_are_not_read_and_alike_files_are_looked_through_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [stored(engine, tmp_path / str(seed), seed=seed) for seed in range(3)]
    looked: list[str] = []
    finish = Saved.finish
    monkeypatch.setattr(Saved, "finish", lambda self: (looked.append(self.folder), finish(self))[1])
    monkeypatch.setattr(Buffer, "read", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr("coserve.adapters.files.load_file", lambda _: pytest.fail("weights are read"))
    outlines = Outlines(engine.base, engine.base.dtype, lambda _: 7)
    versions = [outlines.look("a", folder) for folder in folders]
    assert looked == [str(folders[0])]
    assert len({version.outline.cost for version in versions}) == 1
    assert versions[0].cost == versions[0].outline.nbytes + 7
    assert len({version.stamp for version in versions}) == 3


def test_what_lies_in_memory_does_not_change_with_the_file(engine: Engine, tmp_path: Path) -> None:
    """In the base's own type nothing has to be converted: even then it is a copy."""
    folder = stored(engine, tmp_path)
    version = loaded(engine, folder)
    before = {name: tensor.clone() for name, tensor in version.parameters().items()}
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\x01" * 4096)
    assert all(torch.equal(version.parameters()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} cannot be read"),
        (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG} cannot be read"),
        (lambda folder: os.truncate(folder / WEIGHTS, 5000), "has changed since the adapter was loaded"),
        (lambda folder: os.utime(folder / WEIGHTS, (1, 1)), "has changed since the adapter was loaded"),
    ],
    ids=["gone", "no configuration", "cut off", "written again"],
)
def test_files_that_are_not_what_they_were_are_refused(
    engine: Engine, tmp_path: Path, harm: object, words: str
) -> None:
    found = engine.adapters.look_at("a", stored(engine, tmp_path))
    assert callable(harm)
    harm(tmp_path)
    with pytest.raises(AdapterError, match=words) as refused:
        found.read(engine.base, engine.base.dtype, engine.base.device)
    assert str(tmp_path) not in str(refused.value)


def test_what_cannot_be_an_adapter_is_found_without_its_weights(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="cannot be read"):
        engine.adapters.look_at("a", tmp_path)
    folder = stored(engine, tmp_path)
    os.truncate(folder / WEIGHTS, 5000)
    with pytest.raises(AdapterError, match="cannot be read"):
        engine.adapters.look_at("a", folder)
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(AdapterError, match="cannot be read"):
        engine.adapters.look_at("a", folder)
    folder = stored(engine, tmp_path)
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('"r": 4', '"r": 5'))
    with pytest.raises(AdapterMismatch, match="matrices of rank 4"):
        engine.adapters.look_at("a", folder)
