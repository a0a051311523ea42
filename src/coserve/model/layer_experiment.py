"""An experiment with a decoder layer of a base: whether kernels give what its modules give, bit for bit."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from coserve.attention.backend import CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.attention.paged import make_batched
from coserve.kernels.attention import AttentionSpec
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Call

_PAGE, _PADDING = 16, 6  # positions of a page, and rows
_LENGTHS, _TABLE = (3, 18), ((2, 0), (1, 3))  # positions and pages of two sequences

Compute = Callable[[Tensor, Call], Tensor | None]  # a part of a layer, given hidden rows and its arguments
T = TypeVar("T")


class LayerExperiment:
    """Random rows of two sequences and some padding, and random keys and values before them."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._generator = torch.Generator().manual_seed(0)
        lengths = [min(length, base.max_positions) for length in _LENGTHS]
        known = [length - 1 for length in lengths] + [0] * _PADDING
        positions = torch.tensor(known, device=base.device)
        embedded, self._calls = base.prologue(torch.zeros_like(positions), positions)
        self._hidden = self.drawn(*embedded.shape).to(embedded)
        decoding = positions[: len(lengths)], [1] * len(lengths), lengths, len(lengths)
        self._common = CommonAttentionMetadata(torch.tensor(_TABLE, device=base.device), *decoding)

    @property
    def rows(self) -> int:
        """Rows with padding."""
        return self._hidden.shape[1]

    def drawn(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, generator=self._generator)

    @torch.no_grad()
    def find(
        self, index: int, own: Compute, candidates: Callable[[AttentionSpec], Iterable[tuple[T, Compute]]]
    ) -> T | None:
        """The first candidate that gives what `own` gives, and writes the same keys and values. Candidates
        are made for the way in which the layer attends, each with what it computes; there are none for one
        that is not plain."""
        caches = [
            replace(cache, groups=cache.groups if layer == index else 0)
            for layer, cache in enumerate(self._base.caches)
        ]
        cache = caches[index]
        pages = [self.drawn(cache.groups, 2 * _PAGE, cache.key).to(self._hidden) for _ in range(2)]
        rows = []
        for _ in range(2):
            backend = make_batched(caches, len(_TABLE) * 2, _PAGE, self._hidden.dtype, self._hidden.device)
            for table in _TABLE:
                backend.fill(index, table, *pages)
            rows.append(_NotingRows(backend, self._common, self.rows))
        wanted = self._run(rows[0], own, index)
        if wanted is None or not rows[0].specs or not rows[0].specs[0].is_plain:
            return None
        for candidate, compute in candidates(rows[0].specs[0]):
            found = self._run(rows[1], compute, index)
            if found is not None and all(map(torch.equal, wanted, found)):
                return candidate
        return None

    def _run(self, rows: "_NotingRows", compute: Compute, index: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output, keys and values."""
        with self._base.cell.set(FusedRows([rows], [])):
            out = compute(self._hidden, self._calls[index])
        return None if out is None else (out, *rows.pool.gather(index, self._common.block_table.flatten()))


class _NotingRows(InferenceRows):
    """Rows that record how a layer attends."""

    def __init__(self, backend: BatchedBackend, common: CommonAttentionMetadata, count: int) -> None:
        super().__init__(backend, common, count)
        self.pool = backend
        self.specs: list[AttentionSpec] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.specs.append(spec)
        return super().attend(layer, q, k, v, spec)
