"""Checks that a server's device exists, before any process is started.

The engine would report that, too, after seconds of imports. The driver is queried in a process of its own, to
keep its state out of the supervisor; if it hangs, the engine reports it.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError

_DRIVER_SECONDS: Final = 20.0  # for the driver to count its devices
_COUNT: Final = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit("no NVIDIA driver is installed")
count = ctypes.c_int()
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if failed:
    raise SystemExit(f"the NVIDIA driver finds no device that can be used (CUDA error {failed})")
print(count.value)
"""


def require_device(device: str) -> None:
    """Raises ConfigError where `device` is a GPU that torch cannot use here. Other errors are left to the
    engine."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or sys.platform != "linux":
        return
    version = _torch_version()
    if "hip" in _builds(version):  # AMD's devices have the same name, and another driver
        return
    if version and not _builds(version):
        raise _unusable(
            device, "the torch that is installed is a CPU build (see pytorch.org for one with CUDA)"
        )
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _COUNT],
            capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return
    if found.returncode:
        raise _unusable(device, (found.stderr.strip().splitlines() or ["the NVIDIA driver fails"])[-1])
    if index.isdigit() and int(index) >= int(found.stdout):
        raise _unusable(device, f"there are {int(found.stdout)} devices, and the first is cuda:0")


def _unusable(device: str, reason: str) -> ConfigError:
    return ConfigError(
        f"device {device} cannot be used: {reason}; serve with --device cpu, or see `coserve doctor`"
    )


def _torch_version() -> str:
    """Contents of torch's version.py, read without importing torch; empty if missing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""


def _builds(version: str) -> set[str]:
    """Platforms that torch was built for, of "cuda" and "hip"."""
    return set(re.findall(r"^(cuda|hip)\b[^=]*=\s*['\"]", version, re.MULTILINE))
