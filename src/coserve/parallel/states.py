"""States of tensors over ranks, and how one becomes another.

The states are torch's own placements. A tensor of rows [rows, width] is `ROWS_WHOLE` on every rank, has its
columns `COLUMNS_CUT` between them, or is the `SUMMANDS` that add up to it. Weights have states too:
`Shard(0)` has its outputs cut, `Shard(1)` its inputs.

A gradient has a state of its own. That of a cut tensor is cut alike, and that of a sum is whole, as each
summand has it. The gradient of a whole tensor is whole where every rank computes all of it, and a sum where
each rank has computed with a part of what follows.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

State = Placement
ROWS_WHOLE: Final[State] = Replicate()
COLUMNS_CUT: Final[State] = Shard(1)
SUMMANDS: Final[State] = Partial()
STATES: Final = (ROWS_WHOLE, COLUMNS_CUT, SUMMANDS)

# States that the gradient of a tensor of rows may have, by the tensor's own.
GRADIENTS: Final[Mapping[State, tuple[State, ...]]] = {
    ROWS_WHOLE: (ROWS_WHOLE, SUMMANDS),
    COLUMNS_CUT: (COLUMNS_CUT,),
    SUMMANDS: (ROWS_WHOLE,),
}


class Change(Enum):
    """The step of a tensor of rows from one state to another: FlexLLM's parallelization operators. `SPREAD`
    puts zeros around a rank's columns, which sends nothing."""

    NOTHING = "nothing"
    PARTITION = "partition"
    COMBINE = "combine"
    REDUCE = "reduce"
    REDUCE_PARTITION = "reduce and partition"
    SPREAD = "spread"


# The change between two states; there is none from a whole tensor to a sum, which would count it once a rank.
CHANGES: Final[Mapping[tuple[State, State], Change]] = {
    **{(state, state): Change.NOTHING for state in STATES},
    (ROWS_WHOLE, COLUMNS_CUT): Change.PARTITION,
    (COLUMNS_CUT, ROWS_WHOLE): Change.COMBINE,
    (COLUMNS_CUT, SUMMANDS): Change.SPREAD,
    (SUMMANDS, ROWS_WHOLE): Change.REDUCE,
    (SUMMANDS, COLUMNS_CUT): Change.REDUCE_PARTITION,
}


def sign(state: State | None) -> str:
    """A state as FlexLLM's figure 6 draws it: = whole on every rank, | cut, + summands; empty for None."""
    if state is None:
        return ""
    return "=" if isinstance(state, Replicate) else "+" if isinstance(state, Partial) else "|"


ChangePair = tuple[Change, Change]  # of a tensor, and of its gradient on the way back
NO_CHANGE: Final[ChangePair] = (Change.NOTHING, Change.NOTHING)
