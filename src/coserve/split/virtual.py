"""Virtual layers (Symbiosis, 3.2): linears of a client whose products an executor computes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.model.group import GroupRows, Prepared
from coserve.split.absent import AbsentWeight, check_frozen
from coserve.split.linears import shape_of
from coserve.split.remote_group import RemoteGroup


class Siblings(GroupRows):
    """The linears of one group in a model that runs its own forward: the first one called requests all."""

    def __init__(self, group: RemoteGroup) -> None:
        super().__init__()
        self._group = group

    @property
    def is_training(self) -> bool:
        """Tells whether a graph is recorded."""
        return torch.is_grad_enabled()

    def product(self, path: str, x: Tensor) -> Tensor:
        """The linear's product, in the current graph."""
        return self._ask(path, self._group, x)[0]

    def _is_changed(self, path: str) -> bool:
        return False

    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        return None, lambda: None


class VirtualLinear(nn.Linear):
    """A linear of a base executor; `weight` and `bias` are absent."""

    path: str
    siblings: Siblings

    def forward(self, x: Tensor) -> Tensor:
        check_frozen(self.path, self)
        return self.siblings.product(self.path, x)


class VirtualConv1D(Conv1D):  # type: ignore[misc]
    path: str
    siblings: Siblings

    def forward(self, x: Tensor) -> Tensor:
        check_frozen(self.path, self)
        return self.siblings.product(self.path, x)


def virtual(path: str, linear: nn.Module, siblings: Siblings) -> nn.Module:
    """The module that replaces a linear: of the same class for libraries that ask, without its weights."""
    out, into = shape_of(linear)
    made: Any
    with torch.device("meta"):
        made = VirtualConv1D(out, into) if isinstance(linear, Conv1D) else VirtualLinear(into, out)
    made.path, made.siblings = path, siblings
    for name, old in linear.named_parameters(recurse=False):
        setattr(made, name, AbsentWeight.instead_of(old, f"{path}.{name}"))
    if linear.bias is None:
        made.bias = None
    made.train(linear.training)
    return made  # type: ignore[no-any-return]
