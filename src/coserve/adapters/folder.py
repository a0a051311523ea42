"""The two files of an adapter's folder, and what is said where they are not as they should be."""

from pathlib import Path
from typing import Final

from coserve.errors import AdapterError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PICKLED: Final = "adapter_model.bin"
_BEGINNINGS: Final = (b"PK\x03\x04", b"\x80\x02")  # of the files that torch.save writes
_CONVERT: Final = (
    "which may run anything when it is opened, so coserve does not read it as it is; `coserve adapters "
    f"convert {{}}` reads its tensors in a process of its own and writes {WEIGHTS}"
)


def unreadable(file: Path, error: object) -> AdapterError:
    """The error for a file of an adapter that cannot be opened, or is no safetensors file."""
    if file.name == WEIGHTS:
        if not file.exists() and (file.parent / PICKLED).is_file():
            return AdapterError(f"{file.parent / PICKLED} is a pickle, {_CONVERT.format(PICKLED)}")
        if file.is_file() and _first_bytes(file).startswith(_BEGINNINGS):
            return AdapterError(f"{file} is a pickle under another name, {_CONVERT.format(WEIGHTS)}")
    return AdapterError(f"{file} cannot be read: {error}")


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(4)
    except OSError:
        return b""
