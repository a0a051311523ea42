"""The adapters of a step: low-rank ones with their rows, slots, ranks and scales; what is left of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses, Side
from coserve.adapters.lowrank import is_lora
from coserve.kernels.lora.backend import LoraBackend, LoraSegment, SiblingsBackend
from coserve.kernels.lora.segments import LoraBackends, LoraSegments
from coserve.kernels.lora.slots import SlotWeights
from coserve.kernels.native.layer import LINEARS, NORMS, SUBLAYERS, LayerOwnWeights, OwnWeight
from coserve.kernels.native.lora import NO_ROWS, LayerLora, LoraRows, readable

AdapterRows = tuple[slice, Bypasses]  # the rows of one adapter


@dataclass(frozen=True, slots=True, eq=False)
class LayerPaths:
    """Paths of a layer's modules in the order of its kernel: its seven linears, of which rows may change the
    input of those `entered`; its two norms; its two sublayers; and all `others` that adapters may change. The
    rows are of `dtype`."""

    linears: tuple[str, ...]
    entered: tuple[str, ...]
    norms: tuple[str, ...]
    sublayers: tuple[str, ...]
    others: tuple[str, ...]
    dtype: torch.dtype


class LayerAdapters(NamedTuple):
    """The bypasses of a step's rows in a layer, as its kernel reads them."""

    lora: LayerLora
    own: LayerOwnWeights


NO_ADAPTERS: Final = LayerAdapters(
    LayerLora([NO_ROWS] * (LINEARS + SUBLAYERS)), LayerOwnWeights([()] * (LINEARS + NORMS))
)


class SlotRows:
    """Rows of a step whose adapters have slots of one pool; `weights` are the pool's, by linear."""

    def __init__(self, weights: Mapping[str, SlotWeights], backend: LoraBackend[SlotWeights]) -> None:
        self.weights, self._backend = weights, backend
        self._latest: tuple[Tensor, Tensor, Any] | None = None

    def add_(self, path: str, x: Tensor, y: Tensor) -> None:
        """As `LoraBatch.add_`. Consecutive linears with the same input tensor share their first product."""
        weights = self.weights.get(path)
        if weights is None:
            return
        if self._latest is None or self._latest[0] is not x or self._latest[1] is not weights.down:
            self._latest = x, weights.down, self._backend.shrink(x.flatten(0, -2), weights)
        self._backend.expand_(self._latest[2], weights, y)

    def add_siblings_(self, paths: Sequence[str], x: Tensor, ys: Sequence[Tensor]) -> None:
        """As `add_` for linears with the same input; by a backend of rows in one launch for all that share
        their first product."""
        alike: dict[int, list[tuple[SlotWeights, Tensor]]] = {}
        for path, y in zip(paths, ys, strict=True):
            if (weights := self.weights.get(path)) is not None:
                alike.setdefault(id(weights.down), []).append((weights, y))
        for found in alike.values():
            own, outputs = [weights for weights, _ in found], [y for _, y in found]
            h = self._backend.shrink(x.flatten(0, -2), own[0])
            whole = sum(weights.ranks.stop - weights.ranks.start for weights in own) == h.shape[-1]
            if isinstance(self._backend, SiblingsBackend) and whole and len(own) in (2, 3):
                self._backend.expand_siblings_(h, own, outputs)
            else:
                for weights, y in found:
                    self._backend.expand_(h, weights, y)


class LoraBatch:
    """Adapters over their ranges of rows, in row order, made once for all linears of a pass. Plain low-rank
    bypasses are multiplied together; `rest` are the adapters' other bypasses. Rows of `slots` are multiplied
    by their pools."""

    def __init__(self, adapters: Sequence[AdapterRows], slots: Sequence[SlotRows] = ()) -> None:
        self.adapters, self.slots = adapters, slots
        self._backends = LoraBackends()
        self._segments: dict[str, LoraSegments | None] = {}
        self._native: dict[LayerPaths, LayerAdapters | None] = {}
        self.rest: list[AdapterRows] = []
        for rows, own in adapters:
            others = {path: bypass for path, bypass in own.outputs.items() if not is_lora(bypass)}
            if others or own.inputs:
                self.rest.append((rows, Bypasses(own.inputs, others)))

    @property
    def is_empty(self) -> bool:
        """Tells whether the batch has no rows."""
        return not self.adapters and not self.slots

    def covers(self, paths: Sequence[str]) -> bool:
        """Tells whether any row has a low-rank bypass at one of these linears."""
        tables = [*(own.outputs for _, own in self.adapters), *(rows.weights for rows in self.slots)]
        return any(path in table for table in tables for path in paths)

    def with_rows(self, adapters: Sequence[AdapterRows]) -> "LoraBatch":
        """The batch extended by adapters whose rows follow its own."""
        return LoraBatch([*self.adapters, *adapters], self.slots) if adapters else self

    def add_(self, path: str, x: Tensor, y: Tensor) -> None:
        """Adds the bypasses at a linear to y [all rows, out] in place; x [..., in] is the linear's input."""
        for rows in self.slots:
            rows.add_(path, x, y)
        segments = self.at(path)
        if segments is not None:
            segments.add_(x.flatten(0, -2), y)

    def add_siblings_(self, paths: Sequence[str], x: Tensor, ys: Sequence[Tensor]) -> None:
        """As `add_` for linears with the same input, each with its own output."""
        for rows in self.slots:
            rows.add_siblings_(paths, x, ys)
        for path, y in zip(paths, ys, strict=True) if self.adapters else ():
            if (segments := self.at(path)) is not None:
                segments.add_(x.flatten(0, -2), y)

    def native(self, paths: LayerPaths) -> LayerAdapters | None:
        """The bypasses in a layer for its kernel; None where it does not read one of them."""
        if paths not in self._native:
            self._native[paths] = self._readable(paths)
        return self._native[paths]

    def at(self, path: str) -> LoraSegments | None:
        """All segments at a linear, made once; None where there are none."""
        if path not in self._segments:
            self._segments[path] = self.segments(path)
        return self._segments[path]

    def _readable(self, paths: LayerPaths) -> LayerAdapters | None:
        unread = {*paths.linears, *paths.norms, *paths.sublayers, *paths.others}.difference(paths.entered)
        for _, own in self.rest:
            if not unread.isdisjoint(own.inputs) or any(path in own.outputs for path in paths.others):
                return None
        lora = [*map(self._linear_rows, paths.linears), *map(self._sublayer_rows, paths.sublayers)]
        if any(rows is not None and rows.dtype not in (None, paths.dtype) for rows in lora):
            return None
        weights = [self._own_weights(path, paths.dtype) for path in (*paths.linears, *paths.norms)]
        read = [rows for rows in lora if rows is not None], [each for each in weights if each is not None]
        if self.slots or len(read[0]) < len(lora) or len(read[1]) < len(weights):
            return None
        return LayerAdapters(LayerLora(read[0]), LayerOwnWeights(read[1]))

    def _linear_rows(self, path: str) -> LoraRows | None:
        """The low-rank bypasses at a linear; None where the kernel does not read one of them."""
        segments = self.at(path)
        return NO_ROWS if segments is None else segments.native

    def _sublayer_rows(self, path: str) -> LoraRows | None:
        """The bypasses at a sublayer's output; None where the kernel does not read one of them."""
        found = [own.outputs[path].segment(rows) for rows, own in self.rest if path in own.outputs]
        segments = [segment for segment in found if segment is not None]
        if not found:
            return NO_ROWS
        return readable(segments) if len(segments) == len(found) else None

    def _own_weights(self, path: str, dtype: torch.dtype) -> list[OwnWeight] | None:
        """The weights of rows' own at a linear or norm; None where the kernel does not read one of them."""
        found = [
            bypass.own_weight(rows, side, dtype)
            for rows, own in self.rest
            for side, table in ((Side.INPUT, own.inputs), (Side.OUTPUT, own.outputs))
            if (bypass := table.get(path)) is not None
        ]
        weights = [weight for weight in found if weight is not None]
        return weights if len(weights) == len(found) else None

    def segments(self, path: str, is_added: Sequence[bool] | None = None) -> LoraSegments | None:
        """The segments at a linear, None where there are none. `is_added` tells for each adapter whether its
        bypass has been added or is not needed."""
        added = [False] * len(self.adapters) if is_added is None else is_added
        found = []
        for (rows, own), is_in in zip(self.adapters, added, strict=True):
            if is_lora(bypass := own.outputs.get(path)):
                found.append(LoraSegment(rows.start, rows.stop, bypass.a, bypass.b, bypass.scale, is_in))
        return LoraSegments(found, self._backends) if found else None
