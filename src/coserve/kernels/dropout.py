"""Counter-based dropout: the mask of a row depends on its identity, not on batching."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 64  # rows drawn at once; a window that starts inside a block draws the block and takes its part


@dataclass(frozen=True, slots=True)
class Mask:
    """Dropout with probability `p` for rows [start, start + rows) of the sequence of rows identified by
    `key`.

    `key` must differ wherever masks should differ (job seed, step, micro-batch, linear). `part` is the number
    of the columns that are there among as many equal parts.
    """

    p: float
    key: str
    start: int
    part: tuple[int, int] = (0, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, width], dropped out and scaled by 1 / (1 - p)."""
        (rows, width), (number, count) = x.shape, self.part
        first, last = self.start // _BLOCK, -(-(self.start + rows) // _BLOCK)
        blocks = torch.cat([self._block(block, width * count) for block in range(first, last)])
        kept = blocks[self.start - first * _BLOCK :][:rows, width * number : width * (number + 1)]
        return x * kept.to(device=x.device, dtype=x.dtype)

    def _block(self, block: int, width: int) -> Tensor:
        digest = hashlib.blake2b(f"{self.key}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        return (torch.rand(_BLOCK, width, generator=generator, dtype=torch.float32) >= self.p).float() / (
            1 - self.p
        )
