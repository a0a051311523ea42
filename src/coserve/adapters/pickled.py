"""Tensors of an `adapter_model.bin`, which is a pickle. Runs in a sandbox only, and no module imports it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from coserve.errors import AdapterError

PIECE: Final = 16 * 2**20  # bytes of one item
MOST_TENSORS: Final = 100_000
MOST_TIMES: Final = 2  # as many bytes as the file: tied weights are there twice, other views are an attack
_GLOBAL: Final = re.compile(r"GLOBAL (\S+)")


def tensors(path: str) -> Iterator[Any]:
    """Yields (name, type, shape) of each tensor of a state dict, and behind it its bytes in pieces.

    PyTorch's reader for weights alone makes tensors and plain containers and calls nothing else. Raises
    AdapterError for a file with anything else in it, or with more than it has bytes for.
    """
    name = Path(path).name
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        if "enough memory" in str(error) or "allocate memory" in str(error):
            raise MemoryError from error
        if (found := _GLOBAL.search(str(error))) is not None:
            raise AdapterError(
                f"{name} holds {found[1][:100]}, which is no tensor and may do anything when it is read: ask "
                "whoever made it for safetensors"
            ) from error
        raise AdapterError(f"{name} is not what torch.save writes of tensors") from error
    if not isinstance(state, dict) or not state or len(state) > MOST_TENSORS:
        raise AdapterError(f"{name} must hold a dict of 1 to {MOST_TENSORS} tensors by their names")
    left = MOST_TIMES * Path(path).stat().st_size
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise AdapterError(f"{name} must hold tensors by their names, and has {str(key)[:100]!r}")
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise AdapterError(f"{name}: {key[:100]!r} is no dense tensor")
        size = value.numel() * value.element_size()
        left -= size
        if left < 0:
            raise AdapterError(f"{name} names tensors of more bytes than it has")
        yield key, str(value.dtype).removeprefix("torch."), list(value.shape)
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8) if size else value.new_empty(0)
        for start in range(0, size, PIECE):
            yield bytes(flat[start : start + PIECE].numpy().data)
