"""The inference rows of a step, with their sequences and adapters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.lora_batch import SlotRows
from coserve.attention.backend import InferenceRows
from coserve.attention.states import PassStates
from coserve.core.plan import InferenceSegment
from coserve.model.batch import FusedRows, LayerCalls
from coserve.worker.offloaded import SplitRows


@dataclass(slots=True)
class PassedRows:
    """Inference rows of one pass, segment by segment; `hidden` [1, rows, width] is what they have come to so
    far. `states` are those of their sequences in recurrent layers."""

    segments: Sequence[InferenceSegment]
    counts: Sequence[int]  # of rows each segment has here
    hidden: Tensor
    states: PassStates | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class InferenceBatch(PassedRows):
    """Inference rows on their way through the layers."""

    part: InferenceRows | SplitRows
    calls: LayerCalls
    adapters: list[tuple[slice, Bypasses]]
    layers: range  # all of the model's, or those of a chain's leg
    slots: Sequence[SlotRows] = ()  # instead of `adapters`

    @property
    def padding(self) -> slice:
        """Rows of no segment."""
        return slice(sum(self.counts), self.hidden.shape[1])

    def input(self, layer: int) -> Tensor:
        """See `Traveller`."""
        return self.hidden

    def take(self, layer: int, hidden: Tensor) -> None:
        """See `Traveller`."""
        self.hidden = hidden

    def reach(self, layer: int) -> None:
        """See `Traveller`."""


def adapter_ranges(
    loaded: LoadedAdapters, segments: Sequence[InferenceSegment], counts: Sequence[int]
) -> list[tuple[slice, Bypasses]]:
    """Ranges of neighbouring rows that share an adapter version; rows of the bare base are in none."""
    ranges: list[tuple[slice, Bypasses]] = []
    start = end = 0
    key: str | None = None
    for segment, count in zip(segments, counts, strict=True):  # without a call for each of a step's rows
        if segment.adapter != key:
            if key is not None:
                ranges.append((slice(start, end), loaded.find(key).bypasses))
            start, key = end, segment.adapter
        end += count
    if key is not None:
        ranges.append((slice(start, end), loaded.find(key).bypasses))
    return ranges


def outside_layers(sites: Collection[str], adapters: Sequence[tuple[slice, Bypasses]]) -> FusedRows | None:
    """Rows in the prologue or tail, without attention; None if no adapter has a bypass at `sites`."""
    found = [(rows, bypasses) for rows, bypasses in adapters if bypasses.touches(sites)]
    return FusedRows([], found) if found else None
