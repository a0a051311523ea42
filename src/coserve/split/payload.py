"""Tensors as raw bytes after a message."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.split.messages import Dtype

DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def view_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, uncopied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def new_rows(rows: int, widths: Sequence[int], dtype: Dtype) -> tuple[Tensor, list[Tensor]]:
    """A buffer for a payload, [bytes], and its tensors [rows, width] for each width: views."""
    kind = DTYPES[dtype]
    flat = torch.empty(rows * sum(widths), dtype=kind)
    parts = torch.split(flat, [rows * width for width in widths])
    return flat, [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]
