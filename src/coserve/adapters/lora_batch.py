"""The adapters of a step: low-rank ones with their rows, slots, ranks and scales; what is left of others."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import is_lora
from coserve.adapters.replace import Replacement
from coserve.kernels.lora.backend import LoraBackend, LoraSegment
from coserve.kernels.lora.segments import LoraBackends, LoraSegments
from coserve.kernels.lora.slots import SlotWeights
from coserve.kernels.native.layer import LayerOwnWeights, OwnWeight
from coserve.kernels.native.lora import LayerLora, LoraRows

AdapterRows = tuple[slice, Bypasses]  # the rows of one adapter


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


class LoraBatch:
    """Adapters over their ranges of rows, in row order, made once for all linears of a pass. Plain low-rank
    bypasses are multiplied together; `rest` are the adapters' other bypasses. Rows of `slots` are multiplied
    by their pools."""

    def __init__(self, adapters: Sequence[AdapterRows], slots: Sequence[SlotRows] = ()) -> None:
        self.adapters, self.slots = adapters, slots
        self._backends = LoraBackends()
        self._segments: dict[str, LoraSegments | None] = {}
        self._native: dict[tuple[str, ...], LayerLora | None] = {}
        self._own: dict[tuple[str, ...], LayerOwnWeights | None] = {}
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
        segments = self._at(path)
        if segments is not None:
            segments.add_(x.flatten(0, -2), y)

    def native(self, paths: tuple[str, ...]) -> LayerLora | None:
        """The bypasses at these linears for the kernel of a whole layer; None where it does not read some."""
        if paths not in self._native:
            self._native[paths] = None if self.slots else self._readable(paths)
        return self._native[paths]

    def own_weights(self, modules: tuple[str, ...], others: tuple[str, ...]) -> LayerOwnWeights | None:
        """Weights that replace these linears and norms for some rows, for the kernel of a whole layer; None
        where `rest` has anything else at these or the `others`."""
        if modules not in self._own:
            self._own[modules] = self._replacing(modules, others)
        return self._own[modules]

    def _at(self, path: str) -> LoraSegments | None:
        if path not in self._segments:
            self._segments[path] = self.segments(path)
        return self._segments[path]

    def _readable(self, paths: Sequence[str]) -> LayerLora | None:
        found: list[LoraRows | None] = []
        for path in paths:
            segments = self._at(path)
            rows = None if segments is None else segments.native
            if segments is not None and rows is None:
                return None
            found.append(rows)
        return LayerLora(found)

    def _replacing(self, modules: Sequence[str], others: Sequence[str]) -> LayerOwnWeights | None:
        if any(path in own.inputs for _, own in self.rest for path in (*modules, *others)):
            return None
        if any(path in own.outputs for _, own in self.rest for path in others):
            return None
        found: list[list[OwnWeight]] = []
        for path in modules:
            applied = [(rows, own.outputs[path]) for rows, own in self.rest if path in own.outputs]
            read = [bypass.readable(rows) for rows, bypass in applied if isinstance(bypass, Replacement)]
            weights = [weight for weight in read if weight is not None]
            if len(weights) < len(applied):
                return None
            found.append(weights)
        return LayerOwnWeights(found)

    def segments(self, path: str, is_added: Sequence[bool] | None = None) -> LoraSegments | None:
        """The segments at a linear, None where there are none. `is_added` tells for each adapter whether its
        bypass has been added or is not needed."""
        added = [False] * len(self.adapters) if is_added is None else is_added
        found = []
        for (rows, own), is_in in zip(self.adapters, added, strict=True):
            if is_lora(bypass := own.outputs.get(path)):
                found.append(LoraSegment(rows.start, rows.stop, bypass.a, bypass.b, bypass.scale, is_in))
        return LoraSegments(found, self._backends) if found else None
