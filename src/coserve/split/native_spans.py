"""Spans between the attention of two layers that kernels compute in one call, on the executor; and attention
between two spans, on the client.

Both are recognised by experiment: kernels and modules get the same random rows, and have to give the same
numbers, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor

from coserve.attention.backend import CacheShape
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Attention, Layer, layer_attend, layer_slice
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Call
from coserve.model.layer_experiment import Compute, LayerExperiment
from coserve.model.layer_parts import LINEARS, LayerParts
from coserve.model.native_layer import are_few, rotary_tables

_TRIED: Final = 5  # rows


class NativeSpan:
    """The rest of a layer behind its attention, and the products with which the next one's begins."""

    def __init__(self, parts: LayerParts, layer: Layer, following: Layer | None) -> None:
        self._parts, self._layer, self._following = parts, layer, following

    def __call__(self, hidden: Tensor, attended: Tensor) -> list[Tensor] | None:
        """As `BaseSpan.run`; None for rows that modules compute faster."""
        like = next(self._parts.norms[0].parameters())
        if not are_few(len(hidden), self._parts) or not ops.takes(hidden, attended, like):
            return None
        return layer_slice(self._layer, self._following, hidden.contiguous(), attended.contiguous())

    @staticmethod
    def find(
        parts: LayerParts | None,
        following: LayerParts | None,
        own: Callable[[Tensor, Tensor], Sequence[Tensor]],
    ) -> "NativeSpan | None":
        """The span that computes as `own` does; `following` is None where no layer follows."""
        if parts is None or not all(map(_join, filter(None, (parts, following)))):
            return None
        made = torch.Generator().manual_seed(0)
        last = parts.linear("self_attn.o_proj")
        widths = last.out_features, last.in_features
        like = next(parts.norms[0].parameters())
        rows = [torch.randn(_TRIED, width, generator=made).to(like) for width in widths]
        if like.dtype is torch.float32 or not ops.takes(*rows):  # an executor computes as torch does there
            return None
        wanted = own(*rows)
        for layer, after in product(_layers(parts), [None] if following is None else _layers(following)):
            found = NativeSpan(parts, layer, after)
            given = found(*rows)
            if given is not None and all(map(torch.equal, given, wanted)):
                return found
        return None


def _join(parts: LayerParts) -> bool:
    """Heads are the client's to tell apart, so here they have a width of 1."""
    return parts.join(CacheShape(parts.linear("self_attn.k_proj").out_features, 1, 1))


def _layers(parts: LayerParts) -> list[Layer]:
    """The layer with norms that compute in either way; none where kernels do not read its weights."""
    made = (parts.layer(centred, 1, 1.0, None) for centred in parts.centred())
    return [layer for layer in made if layer is not None]


class NativeAttention:
    """A layer's attention over the pages of decode rows, given the products with which it begins."""

    def __init__(self, index: int, paths: Sequence[str], shape: Attention) -> None:
        """`paths` are those of the linears of queries, keys and values."""
        self._index, self.paths, self._shape = index, tuple(paths), shape

    def __call__(self, products: Mapping[str, Tensor], rows: FusedRows, call: Call) -> Tensor | None:
        """The input [1, rows, in] of attention's last linear for products [1, rows, out] by path; None
        where a row has a bypass at their linears, or is no decode row."""
        given = [products[path] for path in self.paths if path in products]
        if len(given) < len(self.paths) or not ops.takes(*given) or not rows.is_bare(self.paths):
            return None
        queries = given[0]
        tables = rotary_tables(call, queries.shape[1], self._shape.width)
        pages = rows.decode_pages([self._index], queries.shape[2])
        if tables is None or pages is None:
            return None
        q, k, v = (product.contiguous() for product in given)
        return layer_attend(self._shape, q, k, v, *tables, pages)

    @staticmethod
    def find(
        experiment: LayerExperiment,
        base: Base,
        index: int,
        own: Callable[[Mapping[str, Tensor], Tensor, Call], Tensor],
    ) -> "NativeAttention | None":
        """The attention that computes as the layer's `own` does."""
        cache, path = base.caches[index], base.chain.blocks[index].path
        paths = [f"{path}.{name}" for name in LINEARS[:3]]
        linears = [base.linears[path] for path in paths if path in base.linears]
        if len(linears) < len(paths) or cache.reads is not None or cache.key != cache.value:
            return None
        query, *others = (linear.out_features for linear in linears)
        groups = cache.groups * cache.key
        if query % groups or others != [groups, groups]:  # the kernel would read beyond them
            return None
        products = {
            linear.path: experiment.drawn(1, experiment.rows, linear.out_features).to(base.dtype)
            for linear in linears
        }
        if not ops.takes(*products.values()):
            return None

        def candidates(spec: AttentionSpec) -> Iterator[tuple[NativeAttention, Compute]]:
            shape = Attention(query // cache.key, cache.groups, cache.key, spec.scale, spec.window)
            attention = NativeAttention(index, paths, shape)
            yield attention, lambda _, call: attention(products, rows_in(base.cell), call)

        return experiment.find(index, lambda hidden, call: own(products, hidden, call), candidates)


def rows_in(cell: BatchCell) -> FusedRows:
    """The rows under way, of an engine's pass."""
    rows = cell.rows
    assert isinstance(rows, FusedRows)
    return rows
