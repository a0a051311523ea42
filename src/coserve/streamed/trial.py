"""Trials of how fast a disk is read, of a model's files or of a folder, and of a link to a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from coserve.errors import CoserveError
from coserve.streamed.copier import Copier
from coserve.streamed.files import WeightFile, ranges, read_header
from coserve.streamed.load import choose_modes
from coserve.streamed.scratch import ScratchFile
from coserve.streamed.stored import Read

WRITTEN: Final = 64 << 20  # bytes of a folder's trial


def model_rate(folder: Path) -> float | None:
    """Bytes a second at which the safetensors files of a model are read; None where there are none, or they
    cannot be read."""
    try:
        reads = [read for file in sorted(folder.glob("*.safetensors")) for read in _longest(file)]
        return choose_modes(reads) or None
    except CoserveError:
        return None


def link_rate(device: torch.device) -> float | None:
    """Bytes a second of copies from the host's memory to a GPU; None for a processor, and for a GPU that is
    not there."""
    return Copier(device).rate() if device.type == "cuda" and torch.cuda.is_available() else None


def folder_rate(folder: str) -> float:
    """Bytes a second at which a scratch file in a folder is read. Raises ConfigError for a folder that can
    hold none."""
    scratch = ScratchFile(folder)
    content = torch.randint(256, (WRITTEN,), dtype=torch.uint8)  # zeros may take no space
    start = scratch.write([(content, 0)], WRITTEN)
    return scratch.file.choose_mode(start, start + WRITTEN)


def _longest(file: Path) -> Sequence[Read]:
    """The longest range of a file's tensors."""
    found = ranges([*read_header(file).values()])
    start, end = max(found, key=lambda found: found[1] - found[0], default=(0, 0))
    return [Read(WeightFile(file), start, 0, end - start)] if end else []
