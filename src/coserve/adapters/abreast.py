"""Low-rank adapters that are in no stack, side by side in a step: long prompts, and windows of many jobs."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses
from coserve.adapters.lowrank import is_plain
from coserve.adapters.stacks import Ranged
from coserve.kernels.beside import Beside, Segment, Ways


class Abreast:
    """Adapters over their ranges of rows, for rows without a graph: what is two products and no more is
    multiplied together; `rest` is what else they have."""

    def __init__(self, ranged: Sequence[Ranged]) -> None:
        self._ranged = ranged
        self._ways: Ways = {}
        self.rest: list[Ranged] = []
        for rows, own in ranged:
            others = {path: bypass for path, bypass in own.outputs.items() if not is_plain(bypass)}
            if others or own.inputs:
                self.rest.append((rows, Bypasses(own.inputs, others)))

    def add_(self, path: str, given: Tensor, y: Tensor) -> None:
        """Adds the bypasses to y [all rows, out] in place; `given` [..., in] is the linear's input."""
        segments = plain_segments((rows, own.outputs.get(path), False) for rows, own in self._ranged)
        if segments:
            beside = Beside(segments, self._ways)
            beside.add_(given.flatten(0, -2), y, beside.a, beside.b)


def plain_segments(ranged: Iterable[tuple[slice, Bypass | None, bool]]) -> list[Segment]:
    """Segments of the plain low-rank bypasses of a range of rows, which may have been added already."""
    return [
        Segment(rows.start, rows.stop, b.a, b.b, b.scale, added) for rows, b, added in ranged if is_plain(b)
    ]
