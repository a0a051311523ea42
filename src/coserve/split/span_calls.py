"""A client's modules that are one call while no adapter is in them.

Only the bound `forward` of a module is replaced. It computes the module itself wherever the executor's result
would differ.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.split.remote_group import RemoteSpan
from coserve.split.spans import is_close

_log = logging.getLogger(__name__)
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # by rounding, relative


class SpanCall(ABC):
    """The `forward` of a module that an executor may compute.

    Its first rows are computed both here and there. Where the results differ (another activation or position
    table, dropout), the module is computed here, until its `content` changes.
    """

    def __init__(self, module: nn.Module, remote: RemoteSpan) -> None:
        self.remote, self.shape = remote, remote.shape
        self._of = weakref.ref(module)  # which has this object
        self.own: Callable[..., Any] = type(module).forward  # the module's computation here
        self._seen: dict[bool, tuple[object, bool]] = {}  # by training: what was compared, and the outcome
        self._is_tuple = False

    @property
    def module(self) -> nn.Module:
        found = self._of()
        assert found is not None, "it is called by its module"
        return found

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""

    @property
    def content(self) -> object:
        """The state of the module for which a comparison holds."""
        return None

    @property
    def is_same(self) -> bool | None:
        """The outcome of the comparison in the module's present state, None before it."""
        found = self._seen.get(self.module.training)
        return None if found is None or found[0] != self.content else found[1]

    def answer(
        self,
        x: Tensor,
        own: Callable[[], Any],
        call: Callable[[Tensor], Tensor],
        several: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """The executor's result for x [..., in] by `call`, or by `several` with the layers that follow; or
        the module's `own` where the two differ."""
        if (is_same := self.is_same) is None:
            y = own()
            is_same = self._compare(x.detach(), y, call)
            if not (is_same and torch.is_grad_enabled() and x.requires_grad):
                return y  # else a checkpoint would not find the same graph again
        return self.given((several or call)(x)) if is_same else own()

    def given(self, y: Tensor) -> Any:
        """The output in the module's own format."""
        return (y,) if self._is_tuple else y

    def _compare(self, x: Tensor, y: Any, call: Callable[[Tensor], Tensor]) -> bool | None:
        """Tells whether y is the executor's result for x, and notes it; None where y is not finite."""
        self._is_tuple = isinstance(y, tuple)
        own = y[0] if isinstance(y, tuple) and len(y) == 1 else y
        shape = (*x.shape[:-1], *self.shape.outputs)
        if not isinstance(own, Tensor) or own.shape != shape or (x.shape[-1],) != self.shape.inputs:
            is_same = False
        elif not own.numel() or not bool(own.isfinite().all()):
            return None
        else:
            is_same = is_close(call(x), own.detach(), TOLERANCE.get(own.dtype, 1e-4))
        self._seen[self.module.training] = self.content, is_same
        if not is_same:
            _log.info("%s is no span here: its linears are called one by one", self.shape.path)
        return is_same
