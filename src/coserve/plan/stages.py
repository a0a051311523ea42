"""Programs and their stages, by which a program's memory is split.

These are the measurements of the multi-LoRA report (4.2.2): weights, a pass without gradients, a forward and
a backward pass with gradients; and an optimizer step after these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from coserve.plan.recipes import Fields


class Stage(StrEnum):
    """Stages of a program, in order. STEP is reached after two optimizer steps, as the first one allocates
    the moments."""

    LOADED = "loaded"
    INFERENCE = "inference"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class System(StrEnum):
    """System that runs a program: plain torch (transformers' model under autograd), or coserve's engine."""

    TORCH = "torch"
    COSERVE = "coserve"


class PlainLoss(StrEnum):
    """Scalar whose gradient plain torch computes: the model's own loss of labels, or the sum of all logits,
    as in the report."""

    LABELS = "labels"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """Size of a program: `batch` sequences of `length` tokens; the cache holds keys and values of
    `cache_tokens`."""

    batch: int = 4
    length: int = 512
    cache_tokens: int = 32768
    loss: PlainLoss = PlainLoss.LABELS

    @property
    def rows(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class Program:
    """Program whose memory is planned: inference, or training (`trains`) of an adapter of these `parts`,
    without parts of all weights. `keep` is coserve's save policy."""

    name: str
    system: System
    load: ProgramSize
    trains: bool
    parts: Sequence[Fields] = ()
    keep: str | int = "inputs"


Peaks = Mapping[Stage, int]  # the most bytes in use until a stage was reached; weights alone at LOADED


def nobody(_layer: int) -> None:
    """The `on_layer` of a run that nobody watches."""


class Run(Protocol):
    """A program on a device, or on tensors without data. `cache` are the bytes of keys and values that it
    holds, `optimizer` those of AdamW's moments and, in the engine, of an adapter's versions, master weights
    and gradients. Both are those at the stage reached. `on_layer` is called with the number of each decoder
    layer that is reached, forward or back."""

    cache: int
    optimizer: int
    on_layer: Callable[[int], object]

    def go(self) -> Iterator[Stage]:
        """Runs the program and yields each stage when reached."""
        ...
