"""Rewrites `adapter_model.bin`, a pickle, as safetensors: a process of its own with limits reads it."""

import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from coserve.adapters.folder import CONFIG, PICKLED, WEIGHTS
from coserve.errors import AdapterError, ConfigError, LimitExceeded
from coserve.sandbox.process import Sandbox

_READER: Final = "coserve.adapters.pickled:tensors"
_MEMORY: Final = 512 * 2**20  # bytes beside the file's, which may lie in memory three times
_SECONDS: Final = 60.0  # of processor time; a gigabyte takes 2 s


def convert_adapter(given: Path, to: Path | None = None) -> tuple[Path, int]:
    """Writes a PEFT adapter with safetensors from `given`, a file that torch.save wrote or its folder.

    Returns the new folder (`to`, or the old one's name with `-safetensors`) and the number of tensors. Raises
    AdapterError, and ConfigError where `to` is there; then nothing is written.
    """
    file = given / PICKLED if given.is_dir() else given
    config = file.parent / CONFIG
    for needed in (file, config):
        if not needed.is_file():
            raise AdapterError(f"there is no {needed}; an adapter has {PICKLED} and {CONFIG} in one folder")
    source = file.parent.resolve()
    to = to or source.with_name(f"{source.name}-safetensors")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is there already: choose a folder that is not, or an empty one")
    found = _read(file.resolve())
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
        staging = Path(scratch, "adapter")
        staging.mkdir()
        shutil.copyfile(config, staging / CONFIG)
        try:
            save_file(found, staging / WEIGHTS, {"format": "pt"})
        except (SafetensorError, ValueError, KeyError) as error:
            raise AdapterError(f"{file} has tensors that safetensors cannot hold: {error}") from error
        if to.exists():
            to.rmdir()
        staging.rename(to)
    return to, len(found)


def _read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors by name."""
    found: dict[str, tuple[str, list[int], bytearray]] = {}
    data = bytearray()
    try:
        with Sandbox(_READER, _MEMORY + 3 * file.stat().st_size) as sandbox:
            for item in sandbox.stream(str(file), seconds=_SECONDS):
                if isinstance(item, bytes):
                    data += item
                else:
                    name, kind, shape = item
                    data = bytearray()
                    found[name] = kind, shape, data
    except LimitExceeded as error:
        raise AdapterError(f"{file} was not read, as {error}") from error
    return {
        name: torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, kind)).reshape(shape)
        if data
        else torch.empty(shape, dtype=getattr(torch, kind))
        for name, (kind, shape, data) in found.items()
    }
