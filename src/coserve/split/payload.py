"""Tensors as raw bytes after a message."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.split.messages import CallDtype, Dtype

DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def view_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, uncopied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def new_rows(rows: int, widths: Sequence[int], dtype: CallDtype) -> tuple[Tensor, list[Tensor]]:
    """A buffer for a payload, [bytes], and its tensors [rows, width] for each width, which share its memory.

    For autograd they are no views: scripts add to products in place, which views of one tensor do not allow.
    """
    flat = torch.empty(rows * sum(widths), dtype=torch.int64 if dtype == "field" else DTYPES[dtype])
    tensors, start = [], 0
    for width in widths:
        tensors.append(flat.new_empty(0).set_(flat.untyped_storage(), start, (rows, width), (width, 1)))
        start += rows * width
    return flat, tensors
