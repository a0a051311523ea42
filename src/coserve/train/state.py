"""State of a job, complete enough to continue as if never interrupted."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.errors import JobError


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a job's data order: everything that decides the examples of each optimizer step. A job
    resumes only if all of it is the same; else examples would be lost or repeated. `data` is
    `train.example.digest`."""

    data: str
    seed: int
    batch_size: int
    epochs: int

    def expect(self, other: "Identity") -> None:
        """Raises JobError if `other` would give the steps different examples."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise JobError(f"the checkpoint is of a job with another {name}: {theirs}, not {mine}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """A job after optimizer step `step`, as constant tensors on the CPU.

    `adapter` holds the master weights. `moments` is AdamW's state by path of the linear, letter of the matrix
    and name (`model.layers.0.mlp.up_proj.lora_A.exp_avg`); matrices that never had a gradient have none.
    `loss` is the last step's, None before the first.
    """

    adapter: AdapterVersion
    moments: Mapping[str, Tensor]
    step: int
    identity: Identity
    loss: float | None = None
