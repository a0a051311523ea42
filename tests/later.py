"""A placement whose answers come later, from other threads, and in no order: the double of a remote one."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from coserve.model.base import Base
from coserve.model.group import Group, Pending
from coserve.model.placement import Offer, Placement
from coserve.model.together import join_siblings

_SLOWEST = 0.001  # seconds that an answer takes at most, beside the product
T = TypeVar("T")


class Elsewhere:
    """Threads that compute, and notes of what they were asked: direction, and paths of linears."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self._threads = ThreadPoolExecutor(3, "elsewhere")
        self._draws = random.Random(0)
        self._lock = threading.Lock()

    def submit(self, direction: str, paths: Sequence[str], compute: Callable[[], T]) -> Pending[T]:
        with self._lock:
            self.calls.append((direction, tuple(paths)))
            delay = self._draws.uniform(0, _SLOWEST)

        def later() -> T:
            time.sleep(delay)
            with torch.no_grad():
                return compute()

        return self._threads.submit(later)


class LaterGroup(Group):
    """Linears that are computed elsewhere, by path; those of one place can be joined."""

    def __init__(self, place: Elsewhere, placements: Mapping[str, Placement]) -> None:
        self.place, self._placements = place, placements
        ones = {path: _one(placement) for path, placement in placements.items()}
        self.outputs = {
            path: placement.forward(ones[path]).shape[-1] for path, placement in placements.items()
        }

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> Pending[Sequence[Tensor]]:
        placements = [self._placements[path] for path in paths]
        return self.place.submit("forward", paths, lambda: [own.forward(x) for own in placements])

    def launch_backward(self, grads: Mapping[str, Tensor]) -> Pending[Tensor]:
        def compute() -> Tensor:
            first, *others = (self._placements[path].backward(grad) for path, grad in grads.items())
            return sum(others, start=first)

        return self.place.submit("backward", list(grads), compute)

    def joined(self, others: Sequence[Group]) -> "LaterGroup | None":
        placements = dict(self._placements)
        for other in others:
            if not isinstance(other, LaterGroup) or other.place is not self.place:
                return None
            placements |= other._placements
        return LaterGroup(self.place, placements)


class LaterPlacement(Placement):
    """The linear at `path` of a group."""

    group: Group

    def __init__(self, place: Elsewhere, path: str, placement: Placement) -> None:
        self._path, self._placement, self.bias = path, placement, placement.bias
        self.group = LaterGroup(place, {path: placement})
        self.offers = frozenset({Offer.BACKWARD, Offer.ROW_NORMS})

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.group.launch(x, [self._path]).result()
        return y

    def backward(self, grad: Tensor) -> Tensor:
        return self.group.launch_backward({self._path: grad}).result()

    def row_norms(self) -> Tensor:
        return self._placement.row_norms()

    def hidden_weight(self) -> Tensor:
        """The dense weight, for oracles only."""
        return self._placement.weight()

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def send_elsewhere(base: Base) -> Elsewhere:
    """All linears of the base are computed elsewhere from now on, siblings in one call."""
    place = Elsewhere()
    for path, linear in base.linears.items():
        linear.placement = LaterPlacement(place, path, linear.placement)
    join_siblings(base)
    place.calls.clear()
    return place


def _one(placement: Placement) -> Tensor:
    weight = placement.weight()
    return weight.new_zeros(1, weight.shape[1])
