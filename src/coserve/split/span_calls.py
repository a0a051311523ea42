"""A client's modules that are one call each while no adapter is in them.

Only the bound `forward` of a module is replaced. It computes the module itself wherever a span's result would
differ.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from coserve.model.batch import BatchCell, FusedRows
from coserve.split.absent import check_frozen
from coserve.split.remote_group import RemoteSpan
from coserve.split.spans import is_close
from coserve.split.virtual import VirtualConv1D, VirtualLinear

Spans = Literal["forward", "always", "never"]
_log = logging.getLogger(__name__)
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # by rounding, relative


class SpanCall(ABC):
    """The `forward` of a module that an executor may compute.

    Its first rows are computed both here and there. Where the results differ (another activation, dropout),
    the module is computed here from then on.
    """

    def __init__(self, module: nn.Module, span: RemoteSpan) -> None:
        self._of = weakref.ref(module)  # which has this object
        self._span = span
        self.own: Callable[..., Any] = type(module).forward  # the module's computation here
        self._is_same: dict[bool, bool] = {}  # by whether the module trains

    @property
    def _module(self) -> nn.Module:
        found = self._of()
        assert found is not None, "it is called by its module"
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        own = self.own
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not self._is_bare(module, args[0]):
            return own(module, *args, **kwargs)
        (x,), is_training = args, module.training
        if is_training not in self._is_same:
            y = own(module, x)
            self._compare(x.detach(), y, is_training)
            if not (torch.is_grad_enabled() and x.requires_grad):
                return y  # else a checkpoint would not find the same graph again
        return self._called(x) if self._is_same.get(is_training) else own(module, x)

    @abstractmethod
    def _is_bare(self, module: nn.Module, x: Tensor) -> bool:
        """Tells whether this input needs only the base's own computation."""

    @abstractmethod
    def _called(self, x: Tensor) -> Tensor:
        """The span's result for x [..., in]."""

    def _compare(self, x: Tensor, y: Any, is_training: bool) -> None:
        """Notes whether y is the span's result for x; notes nothing where y is not finite."""
        shape = (*x.shape[:-1], self._span.shape.outputs)
        if not isinstance(y, Tensor) or y.shape != shape or x.shape[-1] != self._span.shape.inputs:
            is_same = False
        elif not y.numel() or not bool(y.isfinite().all()):
            return
        else:
            is_same = is_close(self._called(x), y.detach(), TOLERANCE.get(y.dtype, 1e-4))
        self._is_same[is_training] = is_same
        if not is_same:
            _log.info("%s is no span here: its linears are called one by one", self._span.shape.path)


class ScriptSpan(SpanCall):
    """The span call of a model that a script drives. Its linears are virtual layers until PEFT replaces
    them."""

    def __init__(self, module: nn.Module, span: RemoteSpan, spans: Spans) -> None:
        super().__init__(module, span)
        self._spans = spans
        start = len(span.shape.path) + 1
        self._names = [(path, path[start:].split(".")) for path in span.shape.linears]

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "ScriptSpan":
        copied = ScriptSpan(memo[id(self._module)], self._span, self._spans)  # of the copy being made
        copied.own = self.own
        return copied

    def _is_bare(self, module: nn.Module, x: Tensor) -> bool:
        if torch.is_grad_enabled() and x.requires_grad and self._spans != "always":
            return False
        if torch.is_autocast_enabled("cpu"):
            return False
        for path, names in self._names:
            linear = module_at(module, names)
            if not isinstance(linear, VirtualLinear | VirtualConv1D) or linear.path != path:
                return False
            check_frozen(path, linear)
        return not any(
            is_watched(inner) or is_random(inner) for inner in module.modules() if inner is not module
        )

    def _called(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Recomputed.apply(x, self._span)  # type: ignore[no-untyped-call]
            return y
        return self._span.forward(x, is_training=torch.is_grad_enabled())


class EngineSpan(SpanCall):
    """The span call of an engine's base. The rows of a run determine whether an adapter is inside, or outputs
    are to be kept."""

    def __init__(self, module: nn.Module, span: RemoteSpan, inside: Sequence[str], cell: BatchCell) -> None:
        """`inside` are paths of modules where adapters may be."""
        super().__init__(module, span)
        self._inside, self._cell = tuple(inside), cell

    def _is_bare(self, module: nn.Module, x: Tensor) -> bool:
        rows = self._cell.rows
        return isinstance(rows, FusedRows) and rows.is_bare(self._inside)

    def _called(self, x: Tensor) -> Tensor:
        rows = self._cell.rows
        return self._span.forward(x, is_training=isinstance(rows, FusedRows) and rows.is_training)


class _Recomputed(torch.autograd.Function):
    """A span in a graph, which keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: RemoteSpan) -> Tensor:
        ctx.save_for_backward(x)
        ctx.span = span
        return span.forward(x, is_training=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.span.backward(x, grads[0]), None


def module_at(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The module inside of another by the names on the way; None where there is none."""
    found: nn.Module | None = module
    for name in names:
        found = None if found is None else found._modules.get(name)
    return found


def is_watched(module: nn.Module) -> bool:
    """Tells whether a script has hooks at a module inside of a span."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_random(module: nn.Module) -> bool:
    """Tells whether the module draws random numbers in its present mode."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0
