"""Finds linears that get the same input, by running the model.

Adapters of linears with one input (queries, keys and values; gate and up) can share their first product, and
remote linears one call.
"""

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec
from coserve.model.base import Base
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
        return placement.forward(x)

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        return y

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)


def join_siblings(base: Base) -> None:
    """Puts linears with the same input into one group, where their placements allow."""
    if all(linear.placement.group is None for linear in base.linears.values()):
        return
    for paths in linears_together(base):
        placements = [base.linears[path].placement for path in paths]
        groups = [placement.group for placement in placements if placement.group is not None]
        joined = groups[0].joined(groups[1:]) if len(groups) > 1 else None
        for placement in placements:
            if joined is not None and placement.group is not None:
                placement.group = joined


@torch.no_grad()
def linears_together(base: Base) -> Together:
    """The linears of all layers, grouped by input; runs one row through the layers."""
    hidden, calls = base.prologue(
        torch.zeros(1, dtype=torch.long, device=base.device),
        torch.zeros(1, dtype=torch.long, device=base.device),
    )
    rows = _Watched()
    with base.cell.set(rows):
        base.chain.run(hidden, calls)
    return tuple(tuple(dict.fromkeys(paths)) for _, paths in rows.given)
