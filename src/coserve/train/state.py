"""State of a job: all that it needs to go on as if it had never stopped."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.errors import JobError


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a job's data order: what decides which examples an optimizer step is made of. A job goes on
    only where all of it is the same, else examples would be lost or repeated. `data` is
    `train.example.digest`."""

    data: str
    seed: int
    batch_size: int
    epochs: int

    def expect(self, other: "Identity") -> None:
        """Raises JobError where `other` would give the steps other examples."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise JobError(f"the checkpoint is of a job with another {name}: {theirs}, not {mine}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """A job after optimizer step `step`, as tensors on the CPU that nobody writes to.

    `adapter` holds the master weights. `moments` is AdamW's state by path of the linear, letter of the matrix
    and name (`model.layers.0.mlp.up_proj.lora_A.exp_avg`); matrices that never had a gradient have none.
    `loss` is the last step's, None before the first.
    """

    adapter: AdapterVersion
    moments: Mapping[str, Tensor]
    step: int
    identity: Identity
    loss: float | None = None
