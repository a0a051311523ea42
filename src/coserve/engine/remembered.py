"""Stores step costs on disk, so that a restart need not measure them.

The file names the circumstances under which its costs were learned. A file of other circumstances or a
damaged one is ignored: the engine measures and writes a new one. Failure to write is ignored too; the next
start measures again, which takes seconds.
"""

import logging
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from coserve.config import EngineConfig
from coserve.kernels.native.build import library
from coserve.model.base import Base
from coserve.schedule.cost import Costs

Circumstances: TypeAlias = Mapping[str, str | int | bool]

_log = logging.getLogger(__name__)


class _Remembered(msgspec.Struct, frozen=True):
    """The file's contents."""

    circumstances: dict[str, str | int | bool]
    costs: Costs


class CostFile:
    """Costs that were learned under these circumstances, in one small JSON file."""

    def __init__(self, path: Path, circumstances: Circumstances) -> None:
        self.path = path
        self._circumstances = dict(circumstances)

    def read(self) -> Costs | None:
        """Reads the costs; None where the file is missing, damaged, or of other circumstances."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Remembered)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("what steps cost is measured again: %s cannot be read: %s", self.path, error)
            return None
        changed = found.circumstances.items() ^ self._circumstances.items()
        if changed:
            names = ", ".join(sorted({name for name, _ in changed}))
            _log.info("what steps cost is measured again: what was remembered differs in %s", names)
            return None
        if not found.costs.is_sound:
            _log.warning("what steps cost is measured again: %s holds what cannot be costs", self.path)
            return None
        return found.costs

    def write(self, costs: Costs) -> None:
        """Replaces the file atomically, by a rename."""
        partial = self.path.with_name(f".{self.path.name}")
        text = msgspec.json.encode(_Remembered(self._circumstances, costs))
        try:
            partial.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
            partial.rename(self.path)
        except OSError as error:
            _log.warning("what steps cost cannot be remembered in %s: %s", self.path, error)


def circumstances(base: Base, config: EngineConfig) -> Circumstances:
    """Everything known that step costs depend on: weights, code, machine, settings.

    Scheduling settings are not part of it.
    """
    return {
        "coserve": _version(),
        "torch": str(torch.__version__),  # its type is a subclass of str
        "compiled kernels": library() is not None,
        "model": base.fingerprint,
        "dtype": str(base.dtype).removeprefix("torch."),
        "quantize": base.quantized,
        "device": device_name(base.device),
        "threads": torch.get_num_threads(),
        "cache_tokens": config.cache_tokens,
        "page_size": config.page_size,
        "cache_dtype": config.cache_dtype,
        "max_running": config.max_running,
        "deterministic": config.deterministic,
        "base": config.base,
        "base_privacy": config.base_privacy,
    }


def _version() -> str:
    try:
        return version("coserve")
    except PackageNotFoundError:  # run from its source
        return ""


def device_name(device: torch.device) -> str:
    """Name of the device that computes: the graphics card's, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """The processor's name as the system reports it, or else the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # elsewhere than Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
