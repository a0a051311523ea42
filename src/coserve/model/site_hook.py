"""Hooks at modules that are no linears: embedding, norms, the outputs of sublayers.

The module tree stays the model's own; only the bound `forward` of the module is replaced.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from coserve.adapters.sites import Kind, Site
from coserve.model.batch import BatchCell


class SiteHook:
    """Adds the bypasses of the rows in `cell` to the output of the module at `site`."""

    def __init__(self, site: Site, module: nn.Module, cell: BatchCell) -> None:
        self._site, self._cell = site, cell
        self._forward: Callable[..., Any] = module.forward
        self._sees_input = site.kind is Kind.EMBEDDING
        module.forward = self._pass

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        out = self._forward(*args, **kwargs)
        rows = self._cell.rows
        if rows is None:
            return out
        y: Tensor = out[0] if isinstance(out, tuple) else out
        given = rows.after(self._site.path, args[0] if self._sees_input else y, y)
        return (given, *out[1:]) if isinstance(out, tuple) else given
