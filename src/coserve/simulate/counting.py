"""Counts what a plan asks of a device, from the plan and the model's shape alone.

The first half of the simulator's cost model; `simulate.hardware` gives these counts seconds. Counted are
products with frozen weights (2 operations a weight and row), attention (4 operations a pair and channel
forward, ten back), keys and values read and written, adapters, optimizer steps, and reductions between the
devices that share a model. Element-wise operations are not counted: the efficiencies of a table cover them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from coserve.core.plan import BasePlan, InferenceSegment, TrainingSegment
from coserve.core.sequence import Direction, Span, stage_spans
from coserve.schedule.segments import causal_pairs
from coserve.workload.shapes import ModelShape

_ADAPTER_BYTES = 2  # of a weight of an adapter that is read
_OPTIMIZER_BYTES = (
    28  # of a trained weight and AdamW step: weight, gradient and two moments read, three written
)
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # of attention (FlashAttention: scores are computed again)
_REDUCTIONS = 2  # of a layer and way, as Megatron-LM shards it: after attention and after the MLP


class PassKind(StrEnum):
    """Part of a step."""

    FORWARD = "forward"
    HEAD = "head"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class PassWork:
    """One pass of `rows` rows over `layers` layers (one for the head), on each of the devices that share
    them.

    Operations and bytes are of one device, for all the layers together. `reductions` are all-reduce calls,
    `reduced_bytes` those that each device contributes to all of them.
    """

    kind: PassKind
    layers: int
    rows: int
    flops: float = 0.0  # of products with frozen weights
    weight_bytes: float = 0.0
    attention_flops: float = 0.0
    cache_bytes: float = 0.0  # keys and values, read and written
    adapter_flops: float = 0.0
    adapter_bytes: float = 0.0
    reductions: int = 0
    reduced_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanCounter:
    """Counts the work of plans for a shape on `degree` devices (tensor parallelism).

    An adapter has `adapter_weights` weights. With `recompute` backward computes a layer's forward again, as
    the engine does when it keeps inputs alone. Of a pipeline's stage `span` are the layers, and the head is
    the last one's; None is the whole model.
    """

    shape: ModelShape
    adapter_weights: int = 0
    degree: int = 1
    recompute: bool = True
    span: Span | None = None

    @property
    def layers(self) -> Span:
        """Layers that are counted."""
        return self.span or Span(0, self.shape.layers)

    def stages(self, count: int) -> tuple["PlanCounter", ...]:
        """Counters of a pipeline's stages, with equally many layers each but for one."""
        return tuple(replace(self, span=span) for span in stage_spans(self.shape.layers, count))

    @property
    def cache_token_bytes(self) -> float:
        """Bytes of one token's keys and values in one layer, on one device."""
        shape = self.shape
        return 2 * shape.hidden * shape.groups / shape.heads * shape.item_bytes / self.degree

    @property
    def device_weight_bytes(self) -> float:
        """Bytes of all weights on one device."""
        shape, layers = self.shape, self.layers
        ends = (layers.first == 0) + self._has_head  # the embedding and the head, of equal size
        norms = shape.parameters - shape.layer_weights - 2 * shape.head_weights
        inside = (shape.layer_weights + norms) * len(layers) / shape.layers
        return (inside + ends * shape.head_weights) * shape.item_bytes / self.degree

    def count(self, plan: BasePlan) -> list[PassWork]:
        """The passes of a plan, in order."""
        return [*self._passes(plan)]

    def _passes(self, plan: BasePlan) -> Iterator[PassWork]:
        for prefix in plan.prefixes:
            if prefix.rows:
                pairs = causal_pairs(prefix.tokens - prefix.rows, prefix.rows)
                yield self._forward(len(self.layers), prefix.rows, pairs, prefix.tokens + prefix.rows, [])
        fused = plan.fused
        decodes = [one for one in plan.inference if plan.passes.decodes_apart and one.length == 1]
        others = [one for one in plan.inference if one not in decodes]
        forward = [one for one in plan.training if one.direction is Direction.TRAIN_FORWARD]
        alone = [one for one in forward if one not in fused]
        for answers, windows in ((decodes, ()), (others, fused), ((), alone)):
            yield from self._forward_pass(answers, windows)
        tail = sum(segment.tail_rows for segment in plan.inference)
        if tail and self._has_head:
            yield self._head(tail)
        for window in plan.training if self._has_head else ():
            if window.direction is Direction.LOGPROBS:
                yield self._head(window.length)
            elif window.direction is Direction.LOSS:
                yield self._loss(window.length)
        yield from self._backward_passes(
            [window for window in plan.training if window.direction is Direction.BACKWARD]
        )
        for _ in plan.updates:
            size = self._adapter_layer * len(self.layers) * _OPTIMIZER_BYTES
            yield PassWork(PassKind.UPDATE, 1, 0, adapter_bytes=size)

    # Forward

    def _forward_pass(
        self, inference: Sequence[InferenceSegment], training: Sequence[TrainingSegment]
    ) -> Iterator[PassWork]:
        """A pass, cut into runs of layers that the same rows visit."""
        adapted = _rows_by_adapter(inference)
        rows = sum(segment.length for segment in inference)
        pairs = sum(causal_pairs(segment.context, segment.length) for segment in inference)
        cached = sum(segment.context + segment.length for segment in inference)
        for first, last, windows in _runs(training, self.layers):
            if not (rows or windows):
                continue
            added = sum(window.length for window in windows)
            mixed = [*adapted, *(window.length for window in windows)]
            yield self._forward(
                last - first,
                rows + added,
                pairs + sum(window.pairs for window in windows),
                cached + 2 * added,
                mixed,
            )

    def _forward(self, layers: int, rows: int, pairs: int, cached: int, adapted: Sequence[int]) -> PassWork:
        """A pass in which `cached` tokens' keys and values are read or written, and the rows of each adapter
        are `adapted`."""
        return PassWork(
            PassKind.FORWARD,
            layers,
            rows,
            flops=layers * 2 * rows * self._layer_weights,
            weight_bytes=layers * self._layer_weights * self.shape.item_bytes,
            attention_flops=layers * self._attention(pairs, _FORWARD_PRODUCTS),
            cache_bytes=layers * cached * self.cache_token_bytes,
            adapter_flops=layers * 2 * sum(adapted) * self._adapter_layer,
            adapter_bytes=layers * len(adapted) * self._adapter_layer * _ADAPTER_BYTES,
            **self._reduced(layers, rows, 1),
        )

    def _head(self, rows: int) -> PassWork:
        """Rows through the final norm and the head."""
        weights = self.shape.head_weights / self.degree
        return PassWork(
            PassKind.HEAD, 1, rows, flops=2 * rows * weights, weight_bytes=weights * self.shape.item_bytes
        )

    # Back

    def _loss(self, rows: int) -> PassWork:
        """Rows through the head, and their gradients back."""
        weights = self.shape.head_weights / self.degree
        return PassWork(
            PassKind.LOSS, 1, rows, flops=4 * rows * weights, weight_bytes=2 * weights * self.shape.item_bytes
        )

    def _backward_passes(self, training: Sequence[TrainingSegment]) -> Iterator[PassWork]:
        """Passes back: the n-th windows of all jobs at a layer share its weights, those of one job do not."""
        for first, last, windows in reversed([*_runs(training, self.layers)]):
            by_job: dict[str, list[TrainingSegment]] = {}
            for window in windows:
                by_job.setdefault(window.job, []).append(window)
            for turn in range(max(map(len, by_job.values()), default=0)):
                yield self._back(last - first, [own[turn] for own in by_job.values() if turn < len(own)])

    def _back(self, layers: int, windows: Sequence[TrainingSegment]) -> PassWork:
        rows, pairs = sum(one.length for one in windows), sum(one.pairs for one in windows)
        times = 1 + self.recompute
        products = _BACKWARD_PRODUCTS + self.recompute * _FORWARD_PRODUCTS
        return PassWork(
            PassKind.BACKWARD,
            layers,
            rows,
            flops=layers * 2 * times * rows * self._layer_weights,
            weight_bytes=layers * times * self._layer_weights * self.shape.item_bytes,
            attention_flops=layers * self._attention(pairs, products),
            cache_bytes=layers * 4 * rows * self.cache_token_bytes,  # and their gradients
            adapter_flops=layers * 2 * (times + 1) * rows * self._adapter_layer,
            adapter_bytes=layers * (times + 2) * len(windows) * self._adapter_layer * _ADAPTER_BYTES,
            **self._reduced(layers, rows, times),
        )

    # Parts

    @property
    def _has_head(self) -> bool:
        return self.layers.last == self.shape.layers

    @property
    def _layer_weights(self) -> float:
        return self.shape.layer_weights / self.shape.layers / self.degree

    @property
    def _adapter_layer(self) -> float:
        return self.adapter_weights / self.shape.layers / self.degree

    def _attention(self, pairs: int, products: int) -> float:
        return 2 * products * pairs * self.shape.hidden / self.degree

    def _reduced(self, layers: int, rows: int, times: int) -> "dict[str, int]":
        if self.degree == 1:
            return {}
        calls = layers * times * _REDUCTIONS
        return {
            "reductions": calls,
            "reduced_bytes": calls * rows * self.shape.hidden * self.shape.item_bytes,
        }


def _rows_by_adapter(segments: Iterable[InferenceSegment]) -> list[int]:
    """Rows of each adapter that the segments name."""
    found: dict[str, int] = {}
    for segment in segments:
        if segment.adapter is not None:
            found[segment.adapter] = found.get(segment.adapter, 0) + segment.length
    return [*found.values()]


def _runs(
    training: Sequence[TrainingSegment], layers: Span
) -> Iterator[tuple[int, int, Sequence[TrainingSegment]]]:
    """Runs [first, last) of layers that the same windows visit, and these; all of `layers`, in order."""
    found = {edge for one in training for edge in (one.span.first, one.span.last)}
    inside = {edge for edge in found if layers.first < edge < layers.last}
    edges = sorted({layers.first, layers.last, *inside})
    for first, last in pairwise(edges):
        yield first, last, [one for one in training if one.span.first <= first and last <= one.span.last]
