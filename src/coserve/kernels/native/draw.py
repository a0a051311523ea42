"""The next tokens of rows of logits in one call of `draw.c`.

Its plain twin is `model/sample.py`, which also draws for the rows that are left to it.
"""

from collections.abc import Sequence
from ctypes import Structure, byref, c_void_p
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.build import kernels

UNDECIDED: Final = -1  # in place of a token


class DrawColumns(NamedTuple):
    """Sampling parameters by slot, each [slots] and contiguous: float32 `temperature` (0 takes the likeliest
    token), `tail` (1 - top_p, negative without a top-p) and `floor` (the logarithm of min_p); int64 `seed`
    and `top_k` (0 for none)."""

    temperature: Tensor
    tail: Tensor
    floor: Tensor
    seed: Tensor
    top_k: Tensor


class _DrawColumns(Structure):
    _fields_: ClassVar = [(name, c_void_p) for name in DrawColumns._fields]


def takes(logits: Tensor) -> bool:
    """Tells whether the kernel reads these logits."""
    return (
        kernels() is not None
        and type(logits) is Tensor  # with data
        and logits.dtype in (torch.bfloat16, torch.float32)
        and logits.is_cpu
        and logits.stride(-1) == 1
    )


def draw(logits: Tensor, slots: Tensor, positions: Tensor, columns: DrawColumns) -> Tensor:
    """The next token of each row of logits [rows, vocabulary], for its slot [rows] and the token's position
    [rows]: [rows]. `UNDECIDED` where the last bits of sums decide, or a logit is not finite."""
    rows, count = logits.shape
    slots, positions = slots.contiguous(), positions.contiguous()
    tokens, found = torch.empty(rows, dtype=torch.long), kernels()
    assert found is not None, "without a library nothing is taken"
    found.draw(
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.float32,
        byref(_DrawColumns(*_addresses(columns))), slots.data_ptr(), positions.data_ptr(), tokens.data_ptr(),
        rows, count, ops.threads(logits.numel()),
    )  # fmt: skip
    return tokens


def _addresses(columns: Sequence[Tensor]) -> list[int]:
    return [column.data_ptr() for column in columns]
