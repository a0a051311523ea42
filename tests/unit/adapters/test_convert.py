"""`adapter_model.bin` becomes safetensors with the same numbers, and whatever else is in it does nothing."""

import os
import pickle
import random
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coserve.adapters import pickled
from coserve.adapters.convert import convert_adapter
from coserve.cli.app import app
from coserve.errors import AdapterError, ConfigError
from models import tiny, with_lora

NAME = "adapter_model.bin"
CASES = int(os.environ.get("COSERVE_ATTACK_PICKLES", "40"))


class Call:
    """Pickled as a call of `os.system` that leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return made


def test_an_adapter_of_peft_is_converted_by_the_command(tmp_path: Path) -> None:
    model = with_lora(tiny("llama"), seed=1)
    model.save_pretrained(str(tmp_path / "safe"))
    safe = load_file(tmp_path / "safe" / "adapter_model.safetensors")
    (tmp_path / "safe" / "adapter_model.safetensors").unlink()
    mixed = {
        name: one.to(torch.bfloat16) if i % 2 else one.T.contiguous().T
        for i, (name, one) in enumerate(safe.items())
    }
    torch.save(mixed, tmp_path / "safe" / NAME)
    ran = CliRunner().invoke(app, ["adapters", "convert", str(tmp_path / "safe" / NAME)])
    made = tmp_path / "safe-safetensors"
    assert ran.exit_code == 0 and f"coserve adapters import {made}" in ran.stdout, ran.output
    found = load_file(made / "adapter_model.safetensors")
    assert found.keys() == mixed.keys()
    assert all(
        found[name].dtype == mixed[name].dtype and torch.equal(found[name], mixed[name]) for name in mixed
    )
    assert (made / "adapter_config.json").read_text() == (
        tmp_path / "safe" / "adapter_config.json"
    ).read_text()
    with pytest.raises(ConfigError, match="there already"):
        convert_adapter(tmp_path / "safe")


def hostile(mark: Path) -> list[tuple[Any, str]]:
    one = torch.zeros(4)
    return [
        ({"a": Call(mark)}, r"holds (os|posix|nt)\.system, which is no tensor"),
        ([one], "must hold a dict"), ({}, "must hold a dict"), ({"a": 5}, "tensors by their names"),
        ({5: one}, "tensors by their names"), ({"a": one.to_sparse()}, "no dense tensor"),
        ({"a": one[:1].expand(10**6)}, "more bytes than it has"),
        ({str(number): one[:1].expand(2000) for number in range(50)}, "more bytes than it has"),
    ]  # fmt: skip


def test_hostile_files_run_nothing(tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / NAME
    for value, said in hostile(mark):
        torch.save(value, file)
        with pytest.raises(AdapterError, match=said):
            list(pickled.tensors(str(file)))
    file.write_bytes(pickle.dumps({"a": Call(mark)}))
    with pytest.raises(AdapterError):
        list(pickled.tensors(str(file)))
    torch.save({"a": torch.zeros(4)}, file)
    whole, draws = file.read_bytes(), random.Random(4)
    for _ in range(CASES):
        made = bytearray(whole[: draws.randrange(len(whole))] if draws.random() < 0.3 else whole)
        for _ in range(draws.randrange(1, 6) if made else 0):
            made[draws.randrange(len(made))] = draws.randrange(256)
        file.write_bytes(made)
        with suppress(AdapterError):
            list(pickled.tensors(str(file)))
    assert not mark.exists()


@pytest.mark.slow
def test_a_refused_file_leaves_nothing_written(folder: Path, tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", folder / NAME
    for value, said in hostile(mark):
        torch.save(value, file)
        with pytest.raises(AdapterError, match=said):
            convert_adapter(folder)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:  # a gigabyte of zeros in a megabyte
        bomb.writestr("archive/data.pkl", bytes(2**30))
        bomb.writestr("archive/version", "3\n")
    with pytest.raises(AdapterError, match=r"MiB|not what torch\.save"):
        convert_adapter(folder)
    assert not mark.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_an_adapter_without_its_configuration_is_told_of(folder: Path) -> None:
    with pytest.raises(AdapterError, match=r"no .*adapter_model\.bin"):
        convert_adapter(folder)
    (folder / NAME).write_bytes(b"")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"no .*adapter_config\.json"):
        convert_adapter(folder)
