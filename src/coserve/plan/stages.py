"""What is done with a model, piece by piece, so that the memory each piece adds can be told apart.

These are the measurements of the multi-LoRA report (4.2.2): weights, a pass without gradients, a pass with
them, there and back; and an optimizer's step after that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from coserve.plan.recipes import Fields


class Stage(StrEnum):
    """Each is reached after those before it. STEP is reached after two optimizer steps: the second finds the
    moments there that the first has made."""

    LOADED = "loaded"
    INFERENCE = "inference"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class System(StrEnum):
    """Who does it: plain torch (transformers' model under autograd), or coserve's engine."""

    TORCH = "torch"
    COSERVE = "coserve"


class Loss(StrEnum):
    """What plain torch goes back from: the model's own loss of labels, or the sum of all logits, which is
    what the report measured with."""

    LABELS = "labels"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Load:
    """How much at once. `cache_tokens` are those that keys and values are held of."""

    batch: int = 4
    length: int = 512
    cache_tokens: int = 32768
    loss: Loss = Loss.LABELS

    @property
    def rows(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class Program:
    """Something to find out the memory of. `parts` are an adapter's; without them everything trains, if
    anything does. `keep` is what coserve's tape keeps."""

    name: str
    system: System
    load: Load
    trains: bool
    parts: Sequence[Fields] = ()
    keep: str | int = "inputs"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those it goes through."""
        return tuple(Stage) if self.trains else (Stage.LOADED, Stage.INFERENCE)


Peaks = Mapping[Stage, int]  # the most bytes in use until a stage was reached; weights alone at LOADED


class Run(Protocol):
    """A program on a device, or on tensors without data. `cache` are the bytes of keys and values that it
    holds, `optimizer` those of what trains beside the model: AdamW's moments and, in the engine, an adapter's
    versions, master weights and gradients. Both are told as far as it has come."""

    cache: int
    optimizer: int

    def go(self) -> Iterator[Stage]:
        """Runs it, and says what it has reached."""
        ...
