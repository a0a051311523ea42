"""Devices that are not there are told of before anything is started."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.errors import ConfigError
from coserve.serve.processes import device as devices
from coserve.serve.processes.device import require_device

CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM = "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n"


def machine(patch: pytest.MonkeyPatch, torch: str, out: str = "", err: str = "") -> None:
    """A machine with this torch, whose driver says this."""

    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(returncode=int(bool(err)), stdout=out, stderr=err)

    patch.setattr(devices, "_torch_version", lambda: torch)
    patch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("device", "torch", "out", "err", "reason"),
    [
        ("cuda", CPU, "8", "", "CPU build"),
        ("cuda", CUDA, "", "no NVIDIA driver is installed\n", "no NVIDIA driver"),
        ("cuda:2", CUDA, "2\n", "", "there are 2 devices"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(
    device: str, torch: str, out: str, err: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, torch, out, err)
    with pytest.raises(ConfigError, match=reason) as error:
        require_device(device)
    assert "--device cpu" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "torch", "out"),
    [("cpu", CPU, "0"), ("cuda", CUDA, "1"), ("cuda:1", CUDA, "2"), ("cuda:7", ROCM, "0"), ("cuda", "", "1")],
)
def test_what_is_there_or_cannot_be_known_is_left_to_the_engine(
    device: str, torch: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, torch, out)
    require_device(device)


def test_serving_on_a_gpu_that_is_not_there_ends_before_anything_is_started(tmp_path: Path) -> None:
    """On a machine with one, it is its thousandth that is not."""
    command = [
        sys.executable,
        "-c",
        "from coserve.cli.app import main; main()",
        "serve",
        "--device",
        "cuda:999",
    ]
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "--port", "0", "--state", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - began < 30, "it took 94 s when engines were tried"
    assert ended.returncode == 1 and not ended.stdout
    assert len(ended.stderr.splitlines()) == 1 and "cuda:999 cannot be used" in ended.stderr
    assert not (tmp_path / "state").exists()


def test_what_takes_longer_to_import_than_that_takes_to_find_out_is_not_imported(tmp_path: Path) -> None:
    code = """
import sys
from coserve.cli.app import app
from coserve.errors import ConfigError
sys.argv = ["coserve", "serve", "--device", "cuda:999", "--port", "0", "--state", sys.argv[1]]
try:
    app()
except ConfigError as error:
    print(error, *sorted(sys.modules), sep="\\n")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "state")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "cuda:999 cannot be used" in said[0]
    heavy = {"rich.console", "torch", "transformers", "fastapi", "sqlalchemy"}
    # In place of asyncio, which pydantic-settings imports: the supervisor, which is why it was imported.
    assert not {*heavy, "coserve.serve.processes.supervisor"} & set(said)
