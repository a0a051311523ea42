"""Block-sparse products in plain torch: the intermediate rows x ranks as blocks, all blocks of one size in
one batched product.

In the report's words (4.3.4) DDS makes the blocks (dense by dense) and SDD multiplies them on (sparse by
dense); the third product, for the gradients of the matrices, multiplies the blocks' transposes. A block has
its adapter's rank, so ranks may be any number; its height suits the segments, so decode rows are not padded
to sixteen. Padding is rows of zeros of the block's own adapter, so adapters cannot affect each other. The
plain twins are `reference.multi_lora` and `multi_lora_backward`; `triton/blocksparse.py` has the kernels for
GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraWeights, or_zeros
from coserve.kernels.lora.layout import Layout

# A block's weights are read and packed anew, which costs about as much as so many rows of it.
_ROWS_FOR_WEIGHTS: Final = 24
# Of a product whose rows are the outputs. Blocks of 128 rows x 2816 outputs in bfloat16, copied to float32
# after, one thread, ms transposed / contiguous: 8 of rank 8 0.33 / 0.41, 4 of rank 16 0.26 / 0.23, 4 of
# rank 64 0.73 / 0.53.
_COLUMNS: Final = 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one size, `height` rows each: block i has rows `lines[i]` (-1 is padding) and the ranks
    of adapter `owners[i]`."""

    height: int
    owners: tuple[int, ...]
    lines: Tensor | slice  # int64 [blocks, height]; a range of rows where these lie there one after the other
    filled: Tensor | None  # int64: which of the lines, end to end, are rows, where not all are

    def stack(self, matrices: Sequence[Tensor]) -> Tensor:
        """The matrices of the blocks' adapters, [blocks, *shape]."""
        return torch.stack([matrices[owner] for owner in self.owners])

    def scale_(self, x: Tensor, scales: Sequence[float]) -> Tensor:
        """Multiplies x [blocks, ...] by the adapters' scales, in place. One by one: a tensor of scales would
        be rounded to x's type."""
        own = [scales[owner] for owner in self.owners]
        if len(set(own)) == 1:
            return x.mul_(own[0])
        for block, scale in zip(x, own, strict=True):
            block.mul_(scale)
        return x

    def rows(self, x: Tensor) -> Tensor:
        """[blocks, height, width] of x [rows, width], with zeros as padding."""
        if isinstance(self.lines, slice):
            return x[self.lines].view(len(self.owners), self.height, -1)
        if self.filled is None:
            return x[self.lines]
        taken = x.new_zeros(self.lines.numel(), x.shape[1])
        taken[self.filled] = x[self.lines.flatten()[self.filled]]
        return taken.view(len(self.owners), self.height, -1)

    def add_(self, y: Tensor, h: Tensor, stacked: Tensor) -> None:
        """Adds the rows of h [blocks, height, rank] · stacked [blocks, rank, width] to theirs of y [rows,
        width]."""
        if isinstance(self.lines, slice):
            y[self.lines].view(len(self.owners), self.height, -1).baddbmm_(h, stacked)
            return
        lines, added = self.lines.flatten(), torch.bmm(h, stacked).flatten(0, 1)
        if self.filled is not None:
            lines, added = lines[self.filled], added[self.filled]
        y.index_add_(0, lines, added)

    def sum_to(self, found: list[Tensor | None], products: Tensor) -> None:
        """Adds products [blocks, ...] to each adapter's sum in `found`, in at least float32."""
        if len(set(self.owners)) == len(self.owners):
            for owner, product in zip(self.owners, products.unbind(), strict=True):
                found[owner] = product
            return
        places = {owner: place for place, owner in enumerate(dict.fromkeys(self.owners))}
        index = torch.tensor([places[owner] for owner in self.owners], device=products.device)
        exact = torch.promote_types(products.dtype, torch.float32)
        sums = products.new_zeros((len(places), *products.shape[1:]), dtype=exact)
        sums.index_add_(0, index, products.to(exact))
        for owner, total in zip(places, sums.to(products.dtype).unbind(), strict=True):
            found[owner] = total


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """A layout as blocks grouped by size; the intermediate of each size is [blocks, height, rank]."""

    sizes: tuple[Blocks, ...]

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "BlockSparse":
        """The blocks of a layout for tensors on a device."""
        ranks = [_length(span) for span in layout.ranks]
        of_rank = sorted(layout.segments, key=lambda segment: (ranks[segment[1]], segment[0].start))
        return BlockSparse(
            tuple(
                _blocks(alike, device)
                for _, segments in groupby(of_rank, key=lambda segment: ranks[segment[1]])
                for alike in _of_one_height(list(segments))
            )
        )

    def shrink(self, x: Tensor, weights: LoraWeights) -> list[Tensor]:
        """DDS, see `LoraBackend`."""
        return [torch.bmm(size.rows(x), size.stack(weights.a).transpose(1, 2)) for size in self.sizes]

    def expand_(self, h: Sequence[Tensor], weights: LoraWeights, y: Tensor) -> None:
        """SDD, see `LoraBackend`."""
        for size, own in zip(self.sizes, h, strict=True):
            scaled = size.scale_(own.clone(), weights.scales)
            size.add_(y, scaled, size.stack(weights.b).transpose(1, 2))

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        of_a: list[Tensor | None] = [None] * len(weights.a)
        of_b: list[Tensor | None] = [None] * len(weights.b)
        for size in self.sizes:
            a, b = size.stack(weights.a), size.stack(weights.b)
            own_grad, own_x = size.rows(grad), size.rows(x)
            between = size.scale_(torch.bmm(own_grad, b), weights.scales)
            if grad_x is not None:
                size.add_(grad_x, between, a)
            size.sum_to(of_a, torch.bmm(between.transpose(1, 2), own_x))
            h = size.scale_(torch.bmm(own_x, a.transpose(1, 2)), weights.scales)
            size.sum_to(of_b, _transposed_product(own_grad, h))
        return or_zeros(of_a, weights.a), or_zeros(of_b, weights.b)


def _transposed_product(grad: Tensor, h: Tensor) -> Tensor:
    """gradᵀ h [blocks, out, rank] of grad [blocks, height, out] and h [blocks, height, rank]: contiguous, as
    the weights that the gradient is added to, unless so few columns make the product slow."""
    if h.shape[-1] < _COLUMNS:
        return torch.bmm(h.transpose(1, 2), grad).transpose(1, 2)
    return torch.bmm(grad.transpose(1, 2), h)


def _of_one_height(segments: Sequence[tuple[slice, int]]) -> list[list[tuple[slice, int]]]:
    """Segments of one rank, apart by length where each has an adapter of its own and there are at least two
    of each length on average: blocks as high as their segments need no padding, and rows that lie there in
    order are not copied. Two of 32 rows and two of 64 of each of four ranks, at a 1024 -> 2816 linear in
    bfloat16, one thread: 2.5 ms forward and 7.5 back as blocks of one height, 1.8 and 4.0 apart."""
    owners = {owner for _, owner in segments}
    by_length: dict[int, list[tuple[slice, int]]] = {}
    for segment in segments:
        by_length.setdefault(_length(segment[0]), []).append(segment)
    is_apart = len(owners) == len(segments) >= 2 * len(by_length)
    return [*by_length.values()] if is_apart else [list(segments)]


def _blocks(segments: Sequence[tuple[slice, int]], device: torch.device) -> Blocks:
    height = _height([_length(segment) for segment, _ in segments])
    tiles = [
        (row, min(row + height, segment.stop), owner)
        for segment, owner in segments
        for row in range(segment.start, segment.stop, height)
    ]
    owners = tuple(owner for _, _, owner in tiles)
    start = tiles[0][0]
    if all(
        (first, last) == (start + i * height, start + (i + 1) * height)
        for i, (first, last, _) in enumerate(tiles)
    ):
        return Blocks(height, owners, slice(start, tiles[-1][1]), None)
    found = [[*range(first, last), *[-1] * (height - last + first)] for first, last, _ in tiles]
    lines = torch.tensor(found, dtype=torch.int64)
    filled = (lines.flatten() >= 0).nonzero().flatten()
    is_full = len(filled) == lines.numel()
    return Blocks(height, owners, lines.to(device), None if is_full else filled.to(device))


def _height(lengths: Sequence[int]) -> int:
    """Block height for segments of these lengths that minimises the cost of reading weights and of
    padding."""
    heights = sorted({max(lengths), *(1 << power for power in range(9))})
    return min(heights, key=lambda h: sum(-(-n // h) for n in lengths) * (h + _ROWS_FOR_WEIGHTS))


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length
