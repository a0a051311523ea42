"""The rows of a run, their adapters, and the arguments of each layer.

All rows of a run travel as one `[1, rows, hidden]` batch. They come in *parts* (the inference rows, training
windows), each with its own keys and values; adapters cover ranges of rows. Linears and attention get this
from the base's `BatchCell`, not through arguments.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses
from coserve.adapters.lora_batch import NO_ADAPTERS, LayerAdapters, LayerPaths, LoraBatch
from coserve.attention.backend import InferenceRows
from coserve.attention.batched import BatchedBackend, UnrotatedRows
from coserve.attention.states import Core
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native.layer import LayerPages
from coserve.model.group import GroupRows, Prepared
from coserve.model.placement import Placement
from coserve.model.replaced import AppliedRows, grouped_product, saves_rows


class Rows(Protocol):
    """The rows of a run, as called by the modules of a base."""

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        """The frozen linear at `path` with all rows' bypasses: x [..., in] to [..., out]."""

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        """Adds all rows' bypasses to another module's output; x and y [1, rows, ...]."""

    def changed(self, path: str) -> int:
        """The number of rows for which `after` changes the output of the module at `path`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of q [1, heads, rows, dk] with new k [1, groups, rows, dk], v [1, groups, rows, dv],
        after rotary embedding; returns [1, rows, heads, dv]."""

    def mix(self, core: Core) -> Tensor:
        """The output [1, rows, width] of a recurrent mixer, each sequence's rows from its own state."""


class BatchCell(threading.local):
    """Holds the rows of the run under way on one base, thread-local; None between runs."""

    def __init__(self) -> None:
        self.rows: Rows | None = None

    @contextmanager
    def set(self, rows: Rows) -> Iterator[None]:
        assert self.rows is None, "one run at a time on a base"
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


class Keeper(Protocol):
    """Receives the outputs of frozen linears, [rows, out], for some rows."""

    def keep(self, path: str, product: Tensor) -> None:
        """Receives the product without bypasses."""

    def keep_sum(self, path: str, y: Tensor) -> None:
        """Receives the product with all bypasses added."""


class BatchPart(Protocol):
    """A contiguous range of rows that attend alike. `keeper` saves activations for backward; None for
    inference."""

    @property
    def count(self) -> int: ...

    @property
    def keeper(self) -> Keeper | None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """As `Rows.attend`, for the rows of this part."""

    def mix(self, core: Core, start: int) -> Tensor:
        """As `Rows.mix`, for the rows of this part, which begin at row `start` of the run."""


class FusedRows(GroupRows):
    """Parts side by side in one forward run without a graph. `adapters` are applied one by one to their rows,
    those of `lora` together. Rows of `padding` are nobody's.

    Each adapter reads and writes its own rows only, so a NaN in one never reaches another. Where one replaces
    a linear, the base's product is not computed for its rows, unless a keeper receives it.
    """

    def __init__(
        self,
        parts: Sequence[BatchPart],
        adapters: Sequence[tuple[slice, Bypasses]],
        lora: LoraBatch | None = None,
        is_training: bool = False,
        padding: slice = slice(0, 0),
    ) -> None:
        super().__init__()
        self._is_training, self._padding = is_training, padding
        self._adapters, self._lora = adapters, None if lora is None or lora.is_empty else lora
        self._parts: list[tuple[slice, BatchPart]] = []
        start = 0
        for part in parts:
            self._parts.append((slice(start, start + part.count), part))
            start += part.count
        self._keepers = [(rows, part.keeper) for rows, part in self._parts if part.keeper is not None]

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        group, added = placement.group, None
        if group is None and not self._keepers and not self._adapters and self._lora is None:
            return placement.complete(placement.forward(x))
        x = self._entering(path, x)
        found = self._applied(path)
        if group is None:
            y, found = self._product(placement, x, found)
        else:
            y, added = self._ask(path, group, x)
        x2, y2 = x.flatten(0, -2), y.flatten(0, -2)
        for rows, keeper in self._keepers:
            keeper.keep(path, y2[rows])
        if added is not None:
            y2 += added
        elif self._lora is not None:
            self._lora.add_(path, x, y2)
        for rows, bypass in found:
            self._add(bypass, rows, x2, y2)
        for rows, keeper in self._keepers:
            keeper.keep_sum(path, y2[rows])
        return placement.complete(y)

    def siblings(
        self, paths: Sequence[str], placements: Sequence[Placement], x: Tensor
    ) -> list[Tensor] | None:
        """As `linear` for linears that have the same input x, whose low-rank bypasses are added together;
        None where each linear has to be asked alone."""
        if self._lora is None or self._keepers or self._adapters:
            return None
        if any(placement.group is not None for placement in placements):
            return None
        products = [placement.forward(x) for placement in placements]
        self._lora.add_siblings_(paths, x, [y.flatten(0, -2) for y in products])
        return [own.complete(y) for own, y in zip(placements, products, strict=True)]

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        found = self._applied(path)
        if found:
            y = y.clone()  # a module may return its input
            for rows, bypass in found:
                self._add(bypass, rows, x[0], y[0])
        return y

    def changed(self, path: str) -> int:
        return sum(rows.stop - rows.start for rows, _ in self._applied(path))

    @property
    def is_training(self) -> bool:
        """Tells that there are no rows of answers."""
        return self._is_training

    def _applied(self, path: str) -> Sequence[AppliedRows]:
        """The bypasses at a module's output, one by one."""
        return [(rows, own.outputs[path]) for rows, own in self._adapters if path in own.outputs]

    def _is_changed(self, path: str) -> bool:
        return any(path in bypasses.inputs for _, bypasses in self._adapters)

    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        def meanwhile() -> Tensor | None:
            if self._lora is None:
                return None
            added = x.new_zeros(x.shape[:-1].numel(), outputs)
            self._lora.add_(path, x, added)
            return added

        return None, meanwhile

    def _product(
        self, placement: Placement, x: Tensor, bypasses: Sequence[AppliedRows]
    ) -> tuple[Tensor, Sequence[AppliedRows]]:
        """The placement's product, or what replaces it for some rows; and the bypasses that are left to be
        applied."""
        if not bypasses:
            return placement.forward(x), bypasses
        replaced, others = list[AppliedRows](), list[AppliedRows]()
        for rows, bypass in bypasses:
            is_free = bypass.replaces and not any(_overlap(rows, kept) for kept, _ in self._keepers)
            (replaced if is_free else others).append((rows, bypass))
        # Padding goes along with the rows before it: alone it would cost the base's product.
        spans = [(self._with_padding(rows), bypass) for rows, bypass in replaced]
        x2 = x.flatten(0, -2)
        if not placement.computes_rows or not saves_rows(x2, spans):
            return placement.forward(x), bypasses
        y = grouped_product(x2, placement.forward, spans)
        return y.view(*x.shape[:-1], y.shape[-1]), others

    def _with_padding(self, rows: slice) -> slice:
        is_last = rows.stop == self._padding.start
        return slice(rows.start, self._padding.stop) if is_last else rows

    def _entering(self, path: str, x: Tensor) -> Tensor:
        """Input of the linear at `path`: x, changed for the rows of adapters that change it."""
        found = [(rows, b.inputs[path]) for rows, b in self._adapters if path in b.inputs]
        if not found:
            return x
        changed = x.clone()  # other modules read x too
        x2, changed2 = x.flatten(0, -2), changed.flatten(0, -2)
        for rows, bypass in found:
            self._add(bypass, rows, x2, changed2)
        return changed

    def _add(self, bypass: Bypass, rows: slice, x: Tensor, y: Tensor) -> None:
        """Applies a bypass to a range of rows, in place."""
        bypass.add_(x[rows], y[rows])

    def is_bare(self, paths: Sequence[str], unchanged: Sequence[str] = ()) -> bool:
        """Tells whether no row has a bypass at these modules, or one that changes the inputs of the linears
        `unchanged`, and no output is to be saved."""
        if self._keepers or any(map(self._is_changed, unchanged)):
            return False
        if any(path in own.inputs or path in own.outputs for _, own in self._adapters for path in paths):
            return False
        return self._lora is None or not self._lora.covers(paths)

    def decode_pages(self, layers: Sequence[int], width: int) -> LayerPages | None:
        """The layers' pages where all rows attend as decode rows do, with queries of `width` numbers, and the
        backend has them as `LayerPages`."""
        if not self.in_pages:
            return None
        part = self._parts[0][1]
        assert isinstance(part, InferenceRows) and isinstance(part.backend, BatchedBackend)
        there = [layer + part.shift for layer in layers]
        return part.backend.decode_pages(there, part.metadata, width)

    def attend_rotated(self, layer: int, rows: UnrotatedRows, spec: AttentionSpec) -> Tensor:
        """As `attend`, of rows that are all `in_pages`, once their queries and keys are rotated."""
        part = self._parts[0][1]
        assert isinstance(part, InferenceRows) and isinstance(part.backend, BatchedBackend)
        return part.backend.attend_rotated(layer + part.shift, rows, part.metadata, spec)

    @property
    def in_pages(self) -> bool:
        """Tells whether all rows are answers', with pages of a `BatchedBackend`."""
        if len(self._parts) != 1:
            return False
        part = self._parts[0][1]
        return isinstance(part, InferenceRows) and isinstance(part.backend, BatchedBackend)

    @property
    def count(self) -> int:
        """Rows without padding."""
        padding: int = self._padding.stop - self._padding.start
        return sum(part.count for _, part in self._parts) - padding

    @property
    def one_by_one(self) -> int:
        """Ranges of rows with bypasses that modules apply one by one."""
        return len(self._adapters)

    def native(self, paths: LayerPaths) -> LayerAdapters | None:
        """The bypasses in a layer for its kernel; None where it does not read one of them, or there are other
        rows than those of answers: of training, or of the proof of the modules themselves."""
        if not self._parts or not all(isinstance(part, InferenceRows) for _, part in self._parts):
            return None
        if self._lora is None:
            return None if self._adapters else NO_ADAPTERS
        return self._lora.native(paths) if self._adapters is self._lora.rest else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0][1].attend(layer, q, k, v, spec)
        outputs = [
            part.attend(layer, q[:, :, rows], k[:, :, rows], v[:, :, rows], spec)
            for rows, part in self._parts
        ]
        return torch.cat(outputs, dim=1)

    def mix(self, core: Core) -> Tensor:
        outputs = [part.mix(core, rows.start) for rows, part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """Arguments of the model's layers for some rows: `calls` are the distinct (args, kwargs),
    `index[layer]` says which one a layer gets (Gemma's local and global layers differ in rotary tables)."""

    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    index: tuple[int, ...]

    def __getitem__(self, layer: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.calls[self.index[layer]]

    def is_one(self, layers: range) -> bool:
        """Tells whether all these layers get the same arguments."""
        return len({self.index[layer] for layer in layers}) == 1


class RowArguments:
    """The dimensions of a layer's tensor arguments that count rows.

    Found by experiment, not by name: the prologue is run for two numbers of rows, and a dimension that
    differs counts rows.
    """

    def __init__(self, fewer: LayerCalls, more: LayerCalls) -> None:
        self._dims = tuple(_row_dims(a, b) for a, b in zip(fewer.calls, more.calls, strict=True))

    def narrow(self, calls: LayerCalls, start: int, length: int) -> LayerCalls:
        """The arguments of rows [start, start + length)."""
        return self._map(calls, lambda tensors, dim: tensors[0].narrow(dim, start, length))

    def concat(self, calls: Sequence[LayerCalls]) -> LayerCalls:
        """The arguments of several groups of rows end to end."""
        if len(calls) == 1:
            return calls[0]
        return self._map(calls[0], torch.cat, [c.calls for c in calls])

    def _map(self, first: LayerCalls, function: Any, every: Sequence[Any] | None = None) -> LayerCalls:
        every = [first.calls] if every is None else every
        merged = tuple(
            _merge(dims, [calls[i] for calls in every], function) for i, dims in enumerate(self._dims)
        )
        return LayerCalls(merged, first.index)


def _overlap(one: slice, other: slice) -> bool:
    return bool(one.start < other.stop and other.start < one.stop)


def _row_dims(a: Any, b: Any) -> Any:
    """A structure like `a`: the row dimension of each tensor that has one, None for anything else."""
    if isinstance(a, Tensor):
        changed = [d for d in range(a.ndim) if a.shape[d] != b.shape[d]]
        return changed[0] if changed else None
    if isinstance(a, dict):
        return {key: _row_dims(a[key], b[key]) for key in a}
    if isinstance(a, tuple | list):
        return [_row_dims(x, y) for x, y in zip(a, b, strict=True)]
    return None


def _merge(dims: Any, values: list[Any], function: Any) -> Any:
    if dims is None:
        return values[0]
    if isinstance(dims, dict):
        return {key: _merge(dims[key], [v[key] for v in values], function) for key in dims}
    if isinstance(dims, list):
        return tuple(_merge(d, [v[i] for v in values], function) for i, d in enumerate(dims))
    return function(values, dims)
