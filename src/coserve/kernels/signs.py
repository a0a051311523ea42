"""Signs of values in one bit each, which suffice for a ReLU's derivative (FlexLLM 5.2)."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_PLACES: Final = (1, 2, 4, 8, 16, 32, 64, 128)


def pack(x: Tensor) -> Tensor:
    """Packs x > 0, [rows, n], into bits [rows, ceil(n / 8)], uint8."""
    positive = F.pad((x > 0).to(torch.uint8), (0, -x.shape[-1] % 8))
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=x.device)
    eights = positive.view(*positive.shape[:-1], -1, 8)
    return (eights * places).sum(-1, dtype=torch.uint8)


def unpack(bits: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Unpacks bits [rows, ceil(n / 8)] to [rows, n]: 1 where the value was positive, 0 elsewhere."""
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] & places).ne(0).flatten(-2)[..., :n].to(dtype)
