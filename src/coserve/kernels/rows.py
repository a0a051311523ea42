"""Concatenates and splits rows. A single part is not copied and adds no node to the graph."""

from collections.abc import Sequence

import torch
from torch import Tensor


def concat_rows(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates parts along `dim`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split_rows(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    """Views of x with `sizes` rows each along `dim`; a single part is all of x."""
    return (x,) if len(sizes) == 1 else torch.split(x, list(sizes), dim)
