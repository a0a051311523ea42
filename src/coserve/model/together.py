"""Finds linears that get the same input, by running the model.

Adapters of linears with one input (queries, keys and values; gate and up) can share their first product, and
remote linears one call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.attention.states import Core
from coserve.kernels.attention import AttentionSpec
from coserve.model.base import Base
from coserve.model.group import Group
from coserve.model.placement import Placement

Together = tuple[tuple[str, ...], ...]  # paths of linears, in the order in which the model calls them


class _Watched:
    """Rows that attend to themselves only, and record each linear's input."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, list[str]]] = []

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        known = next((paths for tensor, paths in self.given if tensor is x), None)
        if known is None:
            self.given.append((x, [path]))
        else:
            known.append(path)
        return placement.complete(placement.forward(placement.entering(x)))

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        return y

    def changed(self, path: str) -> int:
        return 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def mix(self, core: Core) -> Tensor:
        return core.run(slice(0, 1), 1, None)[0]


def join_siblings(base: Base) -> None:
    """Puts linears with the same input into one group, where their placements allow."""
    if all(linear.placement.group is None for linear in base.linears.values()):
        return
    for paths in linears_together(base):
        placements = [base.linears[path].placement for path in paths]
        joined = _joined([placement.group for placement in placements if placement.group is not None])
        for path, placement in zip(paths, placements, strict=True):
            if placement.group is not None:
                placement.group = next(group for group in joined if path in group.outputs)


def _joined(groups: Sequence[Group]) -> list[Group]:
    """The groups, merged where they can be."""
    found: list[Group] = []
    for group in groups:
        merged = ((place, other.joined([group])) for place, other in enumerate(found))
        place, both = next((one for one in merged if one[1] is not None), (None, None))
        if place is None or both is None:
            found.append(group)
        else:
            found[place] = both
    return found


@torch.no_grad()
def linears_together(base: Base) -> Together:
    """The linears of all layers, grouped by input; runs one row through the layers, if they have any."""
    if not base.linears:
        return ()
    hidden, calls = base.prologue(
        torch.zeros(1, dtype=torch.long, device=base.device),
        torch.zeros(1, dtype=torch.long, device=base.device),
    )
    rows = _Watched()
    with base.cell.set(rows):
        base.chain.run(hidden, calls)
    return tuple(tuple(dict.fromkeys(paths)) for _, paths in rows.given)
