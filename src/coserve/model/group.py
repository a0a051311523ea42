"""Groups: frozen linears that are asked in one call, whose answer comes later.

A linear that is computed elsewhere costs a round trip. Linears that are given the same input (query, key and
value; gate and up) share one: whichever is asked first asks for all of them. What bypasses make of the input
alone is computed while the answer is under way, forward and backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """An answer that comes later; a `concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Waits for the answer. Raises what kept it from coming."""
        ...


class Group(ABC):
    """Linears that are given the same input, or one alone. `outputs` are their widths by path."""

    outputs: Mapping[str, int]

    @abstractmethod
    def launch(self, x: Tensor, paths: Sequence[str]) -> Pending[Sequence[Tensor]]:
        """Asks for the products of x [..., in] at these linears, biases included: contiguous tensors of the
        caller's own."""

    @abstractmethod
    def launch_backward(self, grads: Mapping[str, Tensor]) -> Pending[Tensor]:
        """Asks for the gradient of the input [..., in], given those of what these linears gave."""

    def joined(self, others: Sequence[Self]) -> "Group | None":
        """The group of these and all others; None where that would not be one call."""
        return None


# What stands for a product, None where it has to be asked for; and what makes, meanwhile, the sum of bypasses
# that see the input alone, [..., out], or None where there are none.
Prepared = tuple[Tensor | None, Callable[[], Tensor | None]]
Answer = tuple[Tensor, Tensor | None]  # the product, and that sum


class GroupRows(ABC):
    """The side of a run that asks groups, and hands each linear its own answer."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Tensor, Answer]] = {}  # and what was given for them

    def _ask(self, path: str, group: Group, x: Tensor) -> Answer:
        """The answer for the linear at `path`; x [..., in] has the bypasses at its input in it already."""
        if path not in self._answers or self._answers[path][0] is not x:
            is_own = self._is_changed(path)
            paths = [path] if is_own else [p for p in group.outputs if not self._is_changed(p)]
            prepared = {path: self._prepared(path, x, group.outputs[path]) for path in paths}
            self._answers |= {path: (x, found) for path, found in ask(group, x, prepared).items()}
        return self._answers.pop(path)[1]

    @abstractmethod
    def _is_changed(self, path: str) -> bool:
        """Tells whether bypasses change what the linear at `path` is given."""

    @abstractmethod
    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        """What is there without an answer, for a linear that is given x [..., in]."""


def ask(group: Group, x: Tensor, prepared: Mapping[str, Prepared]) -> dict[str, Answer]:
    """One call for those of these linears whose product nothing stands for; in the current graph, if there is
    one, where one call goes back for all of them that a gradient comes to."""
    missing = [path for path, (kept, _) in prepared.items() if kept is None]
    call = _Call(group, list(prepared))
    in_graph = torch.is_grad_enabled() and x.requires_grad
    source: Tensor = _Awaited.apply(x, call) if in_graph else x  # type: ignore[no-untyped-call]
    pending = group.launch(x.detach(), missing) if missing else None
    sums = [meanwhile() for _, meanwhile in prepared.values()]
    answers = iter(() if pending is None else pending.result())
    products = [next(answers) if kept is None else kept for kept, _ in prepared.values()]
    if in_graph:
        products = _Asked.apply(source, call, *products)  # type: ignore[no-untyped-call]
    return dict(zip(prepared, zip(products, sums, strict=True), strict=True))


class _Call:
    """A call in a graph, and the gradient that it waits for on its way back."""

    def __init__(self, group: Group, paths: Sequence[str]) -> None:
        self.group, self.paths = group, paths
        self.pending: Pending[Tensor] | None = None


class _Awaited(torch.autograd.Function):
    """The input of a call. Made before all else that sees the input, it goes back after that: only then its
    gradient is waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.call.pending.result(), None


class _Asked(torch.autograd.Function):
    """The products of a call. Its way back begins once the last gradient of any of them has come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *products: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.shape = call, x.shape
        ctx.set_materialize_grads(False)
        return tuple(product.detach() for product in products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = {path: grad for path, grad in zip(ctx.call.paths, grads, strict=True) if grad is not None}
        ctx.call.pending = ctx.call.group.launch_backward(found)
        nothing = next(iter(found.values())).new_zeros(()).expand(ctx.shape)
        return nothing, None, *(None for _ in grads)
