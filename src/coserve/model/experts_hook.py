"""A hook at a mixture's experts that are one tensor, as those of `site_hook.py` at other modules."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from coserve.adapters.experts import pack_rows
from coserve.model.batch import BatchCell


class ExpertsHook:
    """Replaces the output of the module at `path` for rows in `cell` whose adapter stands beside it."""

    def __init__(self, path: str, module: nn.Module, cell: BatchCell) -> None:
        self._path, self._cell = path, cell
        self._forward: Callable[..., Tensor] = module.forward
        self._signature = signature(type(module).forward)
        module.forward = self._pass

    def _pass(self, *args: Any, **kwargs: Any) -> Tensor:
        rows = self._cell.rows
        count = 0 if rows is None else rows.changed(self._path)
        if rows is None or not count:
            return self._forward(*args, **kwargs)
        _, hidden, index, weights, *_ = self._signature.bind(None, *args, **kwargs).arguments.values()
        # Nothing is left of the base's output where all rows have one of their own.
        y = torch.zeros_like(hidden) if count == len(hidden) else self._forward(*args, **kwargs)
        return rows.after(self._path, pack_rows(hidden, index, weights)[None], y[None])[0]

    @staticmethod
    def of(module: nn.Module) -> "ExpertsHook | None":
        """The hook of a module, if it has one."""
        found = getattr(module.forward, "__self__", None)
        return found if isinstance(found, ExpertsHook) else None

    def remove(self, module: nn.Module) -> None:
        """Gives the module its own `forward` back."""
        module.forward = self._forward
