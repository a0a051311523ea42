"""Decoder layers whose decode rows are computed in one call of a kernel.

A layer is recognised by experiment: the kernel and the layer's own module get the same random rows and pages
when a base is loaded, and have to give the same output and write the same keys and values, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor, nn

from coserve.attention.backend import CacheShape, CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Layer, Norm, PackedLinear, decode_layer
from coserve.kernels.native.lora import LoraRows
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block, Call
from coserve.model.linear import FrozenLinear
from coserve.model.placement import MOST_ROWS, PackedPlacement

_LINEARS: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_ROTARY: Final = "position_embeddings"  # the argument with both tables
_PAGE, _PADDING = 16, 6  # the experiment's positions of a page, and rows
_LENGTHS, _TABLE = (3, 18), ((2, 0), (1, 3))  # and the positions and pages of its sequences


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """A block's shortcut for decode rows of the base, bare or with plain low-rank adapters."""

    index: int
    cell: BatchCell
    linears: tuple[FrozenLinear, ...]
    norms: tuple[nn.Module, ...]
    eps: tuple[float, ...]
    centred: tuple[bool, ...]
    width: int
    spec: AttentionSpec

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where other rows are in the cell, or something
        that kernels do not read."""
        rows = self.cell.rows
        if not isinstance(rows, FusedRows) or hidden.shape[1] > MOST_ROWS:
            return None
        cos, sin = call[1].get(_ROTARY, (None, None))
        weights = [_weight(norm) for norm in self.norms]
        if cos is None or not ops.takes(hidden, cos, sin, *weights) or not hidden.is_contiguous():
            return None
        if not cos.shape == sin.shape == (1, hidden.shape[1], self.width):
            return None
        pages = rows.decode_pages(self.index)
        added = rows.low_rank([linear.path for linear in self.linears])
        linears = [] if added is None else [*self._packed(added)]
        if pages is None or len(linears) < len(self.linears):
            return None
        first, second = map(Norm, weights, self.eps, self.centred)
        layer = Layer(linears, (first, second), self.width, self.spec.scale, self.spec.window)
        return decode_layer(layer, hidden, cos, sin, pages)

    def _packed(self, added: Sequence[LoraRows | None]) -> Iterator[PackedLinear]:
        for linear, lora in zip(self.linears, added, strict=True):
            placement = linear.placement
            if isinstance(placement, PackedPlacement) and (packed := placement.native) is not None:
                yield packed if lora is None else replace(packed, lora=lora)


@torch.no_grad()
def find_decode_layers(base: Base) -> None:
    """Gives the blocks that are recognised their shortcut."""
    if not any(ops.takes(parameter) for parameter in base.model.parameters()):
        return
    experiment: _Experiment | None = None
    for index, block in enumerate(base.chain):
        block.shortcut = None
        with block.visit(Direction.INFER):
            found = _parts(block.module)
            if found is not None:
                experiment = experiment or _Experiment(base)
                block.shortcut = experiment.shortcut(index, block, *found)


def _parts(layer: nn.Module) -> tuple[tuple[FrozenLinear, ...], tuple[nn.Module, ...]] | None:
    """The layer's linears and norms, if it has these and no parameters beside them."""
    modules = dict(layer.named_modules())
    linears = tuple(found for name in _LINEARS if isinstance(found := modules.get(name), FrozenLinear))
    norms = tuple(modules[name] for name in _NORMS if name in modules)
    if len(linears) < len(_LINEARS) or len(norms) < len(_NORMS):
        return None
    placed = sum(isinstance(module, FrozenLinear) for module in modules.values())
    if placed > len(linears) or len([*layer.parameters()]) != len(norms):
        return None
    if not all(ops.takes(*norm.parameters(recurse=False)) for norm in norms):
        return None
    return linears, norms


class _Experiment:
    """Random rows of two sequences and some padding, and random keys and values before them."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._generator = torch.Generator().manual_seed(0)
        lengths = [min(length, base.max_positions) for length in _LENGTHS]
        positions = torch.zeros(len(lengths) + _PADDING, dtype=torch.long)
        positions[: len(lengths)] = torch.tensor(lengths) - 1
        embedded, self._calls = base.prologue(torch.zeros_like(positions), positions)
        self._hidden = self._drawn(*embedded.shape).to(embedded)
        decoding = positions[: len(lengths)], [1] * len(lengths), lengths, len(lengths)
        self._common = CommonAttentionMetadata(torch.tensor(_TABLE), *decoding)

    def shortcut(
        self, index: int, block: Block, linears: tuple[FrozenLinear, ...], norms: tuple[nn.Module, ...]
    ) -> DecodeLayer | None:
        """The block's shortcut, if one gives what the block gives."""
        cache = self._base.caches[index]
        eps = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
        known = tuple(each for each in eps if isinstance(each, float))
        if cache.reads is not None or len(known) < len(norms) or not _join(linears, norms, cache):
            return None
        caches = [replace(each, groups=each.groups if each is cache else 0) for each in self._base.caches]
        pages = [self._drawn(cache.groups, 2 * _PAGE, cache.key).to(self._hidden) for _ in range(2)]
        rows = []
        for _ in range(2):
            backend = BatchedBackend(caches, len(_TABLE) * 2, _PAGE, self._hidden.dtype, self._hidden.device)
            for table in _TABLE:
                backend.fill(index, table, *pages)
            rows.append(_NotingRows(backend, self._common, self._hidden.shape[1]))
        own = self._run(rows[0], lambda: block.run(self._hidden, self._calls[index]), index)
        if not rows[0].specs or not rows[0].specs[0].is_plain:
            return None
        for centred in product((False, True), repeat=len(norms)):
            found = DecodeLayer(
                index, self._base.cell, linears, norms, known, centred, cache.key, rows[0].specs[0]
            )
            short = self._run(rows[1], partial(found, self._hidden, self._calls[index]), index)
            if short is not None and own is not None and all(map(torch.equal, own, short)):
                return found
        return None

    def _run(
        self, rows: "_NotingRows", compute: Callable[[], Tensor | None], index: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output, keys and values."""
        with self._base.cell.set(FusedRows([rows], [])):
            out = compute()
        return None if out is None else (out, *rows.pool.gather(index, torch.tensor(_TABLE).flatten()))

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


class _NotingRows(InferenceRows):
    """Rows that record how a layer attends."""

    def __init__(self, backend: BatchedBackend, common: CommonAttentionMetadata, count: int) -> None:
        super().__init__(backend, common, count)
        self.pool = backend
        self.specs: list[AttentionSpec] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.specs.append(spec)
        return super().attend(layer, q, k, v, spec)


def _join(linears: Sequence[FrozenLinear], norms: Sequence[nn.Module], cache: CacheShape) -> bool:
    """Tells whether one linear's outputs are the next one's inputs, and heads are of one width."""
    query, key, value, out, gate, up, down = linears
    hidden, groups = out.out_features, cache.groups * cache.key
    return (
        cache.key == cache.value
        and {linear.in_features for linear in (query, key, value, gate, up)} == {hidden}
        and {*map(len, map(_weight, norms)), down.out_features} == {hidden}
        and key.out_features == value.out_features == groups
        and query.out_features == out.in_features
        and query.out_features % groups == 0
        and gate.out_features == up.out_features == down.in_features
    )


def _weight(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight
