"""Low-rank bypasses of a step's rows at one linear: forward in place, and all gradients.

Matrices are not copied; `dispatch` chooses the backend. Ranks and numbers of rows are arbitrary. The plain
twins are `reference.multi_lora` and `multi_lora_backward`.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraSegment, LoraWeights, TrainingLoraBackend
from coserve.kernels.lora.dispatch import Approach, make_backend
from coserve.kernels.lora.layout import Layout
from coserve.kernels.native import ops
from coserve.kernels.native.lora import LoraRows, add_lora, goes_back, lora_back, readable


class LoraBackends:
    """Backends of one step by segments' rows and ranks, shared by linears: the fastest, or those of one
    approach."""

    def __init__(self, approach: Approach | None = None) -> None:
        self._approach = approach
        self._made: dict[tuple[tuple[int, int, int], ...], TrainingLoraBackend] = {}

    def of(self, segments: Sequence[LoraSegment], device: torch.device) -> TrainingLoraBackend:
        """The backend for segments on a device; each instance must use one device only."""
        key = tuple((segment.start, segment.stop, len(segment.a)) for segment in segments)
        if key not in self._made:
            spans = [(slice(start, stop), i) for i, (start, stop, _) in enumerate(key)]
            layout = Layout.of(spans, [rank for *_, rank in key])
            self._made[key] = make_backend(layout, device, self._approach)
        return self._made[key]


class LoraSegments:
    """All segments at one linear, without overlaps."""

    def __init__(self, segments: Sequence[LoraSegment], backends: LoraBackends) -> None:
        self._segments, self._backends = segments, backends
        self._left = [segment for segment in segments if not segment.is_added]
        self._is_whole = len(self._left) == len(segments)
        self.weights = LoraWeights(
            [segment.a for segment in segments],
            [segment.b for segment in segments],
            [segment.scale for segment in segments],
        )

    @cached_property
    def _backend(self) -> TrainingLoraBackend:
        return self._backends.of(self._segments, self._segments[0].a.device)

    @cached_property
    def native(self) -> LoraRows | None:
        """All segments for the kernels in C, to be used where these read x and y; None where they do not read
        their matrices."""
        return readable(self._segments)

    @property
    def is_added(self) -> bool:
        """Tells whether forward has nothing to do."""
        return not self._left

    def add_(self, x: Tensor, y: Tensor) -> None:
        """y [rows, out] += scale · x Aᵀ Bᵀ, in place, for segments not added yet; x [rows, in]."""
        rows = self.native if self._is_whole and ops.takes(x, y) and y.is_contiguous() else None
        if rows is not None and rows.dtype is y.dtype:
            add_lora(x, rows, y)
        elif self._is_whole:
            self._backend.expand_(self._backend.shrink(x, self.weights), self.weights, y)
        elif self._left:
            LoraSegments(self._left, self._backends).add_(x, y)

    def backward(self, grad: Tensor, x: Tensor, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        rows = self.native
        if rows is not None and goes_back(x, grad, grad_x, rows):
            return lora_back(x, grad, rows, grad_x)
        return self._backend.backward(grad, x, self.weights, grad_x)
