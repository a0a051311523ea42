"""An experiment with a decoder layer of a base: whether kernels give what its modules give, bit for bit; and
the shortcuts of those layers whose kernels do."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor

from coserve.attention.backend import CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.attention.paged import make_batched
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native.layer import Norm
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Block, Call, Resident
from coserve.model.layer_parts import LayerParts

_PAGE, _PADDING = 16, 6  # positions of a page, and rows
_LENGTHS, _TABLE = (3, 18), ((2, 0), (1, 3))  # positions and pages of two sequences
ROTARY: Final = "position_embeddings"  # a layer's argument with both tables

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


class WholeLayer(ABC):
    """A block's shortcut: kernels of layer `index`, for rows of answers. Its norms are `centred`, and it
    attends as `spec` says. `takes` tells which tensors the kernels read."""

    takes: ClassVar[Callable[..., bool]]

    def __init__(
        self, base: Base, index: int, parts: LayerParts, centred: tuple[bool, ...], spec: AttentionSpec
    ) -> None:
        self.index, self.spec, self.parts, self.centred = index, spec, parts, centred
        self.cell, self.width = base.cell, base.caches[index].key

    @property
    def norms(self) -> tuple[Norm, ...]:
        """In the order of `NORMS`, with the weights where they are now."""
        return self.parts.computed(self.centred)

    @staticmethod
    @abstractmethod
    def through(layers: Sequence[Any], hidden: Tensor, call: Call) -> Tensor | None:
        """The output of layers that follow each other, given hidden [1, rows, width]; None for rows that the
        kernels do not take, or where outputs are to be kept."""

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output, see `through`."""
        return self.through([self], hidden, call)


@torch.no_grad()
def find_whole_layers(base: Base, kind: type[WholeLayer]) -> None:
    """Gives the blocks that are recognised their shortcut, and the chain one through several of them."""
    if not any(kind.takes(parameter) for parameter in base.model.parameters()):
        return
    experiment: LayerExperiment | None = None
    for index, block in enumerate(base.chain):
        block.shortcut = None
        with block.visit(Direction.INFER):
            parts = LayerParts.of(block.module, kind.takes)
            if parts is not None and base.caches[index].reads is None and parts.join(base.caches[index]):
                experiment = experiment or LayerExperiment(base)
                block.shortcut = _recognised(experiment, kind, base, index, parts)

    def through_blocks(blocks: Sequence[Block], hidden: Tensor, call: Call) -> Tensor | None:
        """The output of blocks that lie in memory, where all of them have their shortcut; else None."""
        found = [block.shortcut for block in blocks if isinstance(block.residence, Resident)]
        layers = [shortcut for shortcut in found if isinstance(shortcut, kind)]
        return kind.through(layers, hidden, call) if len(layers) == len(blocks) else None

    base.chain.shortcut = through_blocks


def _recognised(
    experiment: LayerExperiment, kind: type[WholeLayer], base: Base, index: int, parts: LayerParts
) -> WholeLayer | None:
    """The layer's shortcut, if one gives what the layer gives."""

    def candidates(spec: AttentionSpec) -> Iterator[tuple[WholeLayer, WholeLayer]]:
        for centred in parts.centred():
            layer = kind(base, index, parts, centred, spec)
            yield layer, layer

    return experiment.find(index, base.chain.blocks[index].run, candidates)
