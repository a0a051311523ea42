"""Groups: frozen linears computed by one asynchronous call.

A linear that is computed elsewhere costs a round trip. Linears with the same input (query, key and value;
gate and up) share one: the first that is called launches all. Bypasses' work on the input alone is computed
meanwhile, forward and backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A future result, such as a `concurrent.futures.Future`."""

    def result(self) -> T_co:
        """Waits for the result; raises the call's error."""


class Group(ABC):
    """Linears with the same input, or a single one. `outputs` are their widths by path."""

    outputs: Mapping[str, int]

    @abstractmethod
    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> Pending[Sequence[Tensor]]:
        """Starts the products of x [..., in] at these linears, biases included; the results are new
        contiguous tensors. x does not change before they are there. `is_training` tells that no answer waits
        for them."""

    @abstractmethod
    def launch_backward(self, grads: Mapping[str, Tensor]) -> Pending[Tensor]:
        """Starts the gradient of the input [..., in], given those of these linears' outputs."""

    def joined(self, others: Sequence[Self]) -> "Group | None":
        """This group merged with the others; None where that would not be one call."""
        return None


# What stands for a product, None where it has to be computed; and what makes, meanwhile, the sum of bypasses
# that see the input alone, [..., out], or None where there are none.
Prepared = tuple[Tensor | None, Callable[[], Tensor | None]]
Answer = tuple[Tensor, Tensor | None]  # the product, and that sum


class GroupRows(ABC):
    """Rows that call groups, and give each linear its own result. `is_training` tells that there are no rows
    of answers."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Tensor, Answer]] = {}  # and what was given for them

    def _ask(self, path: str, group: Group, x: Tensor) -> Answer:
        """The result for the linear at `path`; x [..., in] includes the bypasses at its input. Threads may
        share a script's model: one that finds another's answers asks for its own."""
        given, answer = self._answers.pop(path, (None, None))
        if given is x and answer is not None:
            return answer
        is_own = self._is_changed(path)
        paths = [path] if is_own else [p for p in group.outputs if not self._is_changed(p)]
        prepared = {path: self._prepared(path, x, group.outputs[path]) for path in paths}
        found = ask(group, x, prepared, self.is_training)
        own = found.pop(path)
        self._answers |= {path: (x, answer) for path, answer in found.items()}
        return own

    @property
    @abstractmethod
    def is_training(self) -> bool: ...

    @abstractmethod
    def _is_changed(self, path: str) -> bool:
        """Tells whether bypasses change the input of the linear at `path`."""

    @abstractmethod
    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        """The linear's product where it need not be computed, and its low-rank bypasses, for x [..., in]."""


def ask(
    group: Group, x: Tensor, prepared: Mapping[str, Prepared], is_training: bool = False
) -> dict[str, Answer]:
    """One call for those of a group's linears without a stand-in for their product; in the current graph, if
    any, with one backward call for all that receive a gradient."""
    missing = [path for path, (kept, _) in prepared.items() if kept is None]
    call = _Call(group, list(prepared))
    in_graph = torch.is_grad_enabled() and x.requires_grad
    source: Tensor = _Awaited.apply(x, call) if in_graph else x  # type: ignore[no-untyped-call]
    pending = group.launch(x.detach(), missing, is_training) if missing else None
    sums = [meanwhile() for _, meanwhile in prepared.values()]
    answers = iter(() if pending is None else pending.result())
    products = [next(answers) if kept is None else kept for kept, _ in prepared.values()]
    if in_graph:
        products = _Asked.apply(source, call, *products)  # type: ignore[no-untyped-call]
    return dict(zip(prepared, zip(products, sums, strict=True), strict=True))


class _Call:
    """A call in a graph, and its pending gradient in backward, where any product has one."""

    def __init__(self, group: Group, paths: Sequence[str]) -> None:
        self.group, self.paths = group, paths
        self.pending: Pending[Tensor] | None = None


class _Awaited(torch.autograd.Function):
    """The input of a call. Created before all other uses of the input, so backward reaches it last: only then
    the gradient is waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        pending, ctx.call.pending = ctx.call.pending, None
        return None if pending is None else pending.result(), None


class _Asked(torch.autograd.Function):
    """The products of a call. Backward launches the call once the gradients of all used products are
    there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *products: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.shape = call, x.shape
        ctx.set_materialize_grads(False)
        return tuple(product.detach() for product in products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = {path: grad for path, grad in zip(ctx.call.paths, grads, strict=True) if grad is not None}
        if not found:  # what follows the products has left them all without a gradient
            return None, None, *(None for _ in grads)
        ctx.call.pending = ctx.call.group.launch_backward(found)
        nothing = next(iter(found.values())).new_zeros(()).expand(ctx.shape)
        return nothing, None, *(None for _ in grads)
