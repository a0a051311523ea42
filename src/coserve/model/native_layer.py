"""Decoder layers that kernels compute: decode rows in one call for several layers, others in two for each.

A layer is recognised by experiment: the kernel and the layer's own module get the same random rows and pages
when a base is loaded, and have to give the same output and write the same keys and values, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor, nn

from coserve.adapters.lora_batch import LayerAdapters, LayerPaths
from coserve.attention.backend import CacheShape, CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Layer, Norm, PackedLinear, decode_layers, layer_begin, layer_end
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block, Call, Resident
from coserve.model.linear import FrozenLinear
from coserve.model.placement import MOST_ROWS

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
_ENTERED: Final = ("self_attn.o_proj", "mlp.down_proj")  # linears whose input no other module reads
_SUBLAYERS: Final = ("self_attn", "mlp")
# Multiply-adds of a linear from which on oneDNN's product gains more than calls of the modules take: 0.26 ms
# a layer of 64 rows and 0.3 for each full fine-tune, 0.02 for LoRA (256x704, two cores). _WORK for each
# adapter whose bypasses modules apply one by one, and _CALLS times as many for the base.
_WORK, _CALLS = 1 << 26, 4
_ROTARY: Final = "position_embeddings"  # the argument with both tables
_PAGE, _PADDING = 16, 6  # the experiment's positions of a page, and rows
_LENGTHS, _TABLE = (3, 18), ((2, 0), (1, 3))  # and the positions and pages of its sequences


class NativeLayer:
    """A block's shortcut for rows of answers: of the base, and of adapters that its kernel reads."""

    def __init__(
        self,
        index: int,
        cell: BatchCell,
        linears: tuple[FrozenLinear, ...],
        norms: tuple[nn.Module, ...],
        paths: LayerPaths,
        eps: Sequence[float],
        centred: Sequence[bool],
        width: int,
        spec: AttentionSpec,
    ) -> None:
        self.index, self.cell, self.width, self.spec = index, cell, width, spec
        self._linears, self._norms, self._eps, self._centred = linears, norms, eps, centred
        self._paths = paths
        self._latest: tuple[PackedLinear, Layer] | None = None  # with the first of its linears

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where outputs are to be kept, or a row has
        something that kernels do not read."""
        return through([self], hidden, call)

    def takes(self, rows: int, adapters: int) -> bool:
        """Tells whether the kernel is faster than the modules with so many rows, where modules apply the
        bypasses of so many adapters one by one."""
        up = self._linears[_LINEARS.index("mlp.up_proj")]
        return rows <= MOST_ROWS or rows * up.in_features * up.out_features <= _WORK * (_CALLS + adapters)

    def native(self) -> Layer | None:
        """The layer as kernels read it; None where they do not read its weights. Kept until these move: all
        tensors of a block do so together, and `Placement.native` is another object then."""
        first = self._linears[0].placement.native
        if first is None:
            return None
        if self._latest is None or self._latest[0] is not first:
            packed = [own for linear in self._linears if (own := linear.placement.native) is not None]
            weights = [_weight(norm) for norm in self._norms]
            if len(packed) < len(self._linears) or not ops.takes(*weights):
                return None
            before, after = map(Norm, weights, self._eps, self._centred)
            layer = Layer(packed, (before, after), self.width, self.spec.scale, self.spec.window)
            self._latest = first, layer
        return self._latest[1]

    def adapters(self, rows: FusedRows) -> LayerAdapters | None:
        """The rows' bypasses in the layer; None where the kernel does not read one of them."""
        return rows.native(self._paths)


def through(layers: Sequence[NativeLayer], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of layers that follow each other, as `NativeLayer` gives one's."""
    first = layers[0]
    rows, count = first.cell.rows, hidden.shape[1]
    if not isinstance(rows, FusedRows) or not all(layer.takes(count, rows.one_by_one) for layer in layers):
        return None
    cos, sin = call[1].get(_ROTARY, (None, None))
    if cos is None or not ops.takes(hidden, cos, sin) or not hidden.is_contiguous():
        return None
    if not cos.shape == sin.shape == (1, count, first.width):
        return None
    native = [found for layer in layers if (found := layer.native()) is not None]
    adapters = [added for layer in layers if (added := layer.adapters(rows)) is not None]
    if not len(native) == len(adapters) == len(layers):
        return None
    pages = rows.decode_pages([layer.index for layer in layers], native[0].heads * first.width)
    if pages is not None:
        lora, own = [each.lora for each in adapters], [each.own for each in adapters]
        return decode_layers(native, lora, own, hidden, cos, sin, pages)
    for layer, kernel, added in zip(layers, native, adapters, strict=True):
        q, k, v = layer_begin(kernel, *added, hidden, cos, sin, rows.count)
        attended = rows.attend(layer.index, q, k, v, layer.spec)
        hidden = layer_end(kernel, *added, hidden, attended, rows.count)
    return hidden


@torch.no_grad()
def find_native_layers(base: Base) -> None:
    """Gives the blocks that are recognised their shortcut, and the chain one through several of them."""
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
    base.chain.shortcut = through_blocks


def through_blocks(blocks: Sequence[Block], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of blocks that follow each other and lie in memory, where all of them have their shortcut;
    else None."""
    found = [block.shortcut for block in blocks if isinstance(block.residence, Resident)]
    layers = [shortcut for shortcut in found if isinstance(shortcut, NativeLayer)]
    return through(layers, hidden, call) if len(layers) == len(blocks) else None


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
    ) -> NativeLayer | None:
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
        paths = self._paths(block, linears)
        own = self._run(rows[0], lambda: block.run(self._hidden, self._calls[index]), index)
        if not rows[0].specs or not rows[0].specs[0].is_plain:
            return None
        for centred in product((False, True), repeat=len(norms)):
            found = NativeLayer(
                index,
                self._base.cell,
                linears,
                norms,
                paths,
                known,
                centred,
                cache.key,
                rows[0].specs[0],
            )
            short = self._run(rows[1], partial(found, self._hidden, self._calls[index]), index)
            if short is not None and own is not None and all(map(torch.equal, own, short)):
                return found
        return None

    def _paths(self, block: Block, linears: tuple[FrozenLinear, ...]) -> LayerPaths:
        entered, norms, sublayers = (
            tuple(f"{block.path}.{name}" for name in names) for names in (_ENTERED, _NORMS, _SUBLAYERS)
        )
        own = tuple(linear.path for linear in linears)
        known = {*own, *norms, *sublayers}
        others = tuple(path for path in self._base.sites if block.holds(path) and path not in known)
        return LayerPaths(own, entered, norms, sublayers, others)

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
