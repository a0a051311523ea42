"""Replaces a model's linears by frozen linears."""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.model.batch import BatchCell
from coserve.model.linear import FrozenLinear
from coserve.model.origin import linear_paths
from coserve.model.placement import Placement

Choose = Callable[[str, Tensor, Tensor | None], Placement | None]  # of path, weight [out, in] and bias
Holds = Callable[[str], bool]  # whether a part of a model has the module at a path


def place_linears(
    model: PreTrainedModel, cell: BatchCell, choose: Choose, holds: Holds = lambda _: True
) -> None:
    """Replaces linears at paths that `holds` accepts for which `choose` gives a placement, one at a time:
    each weight is freed before the next is placed."""
    for path in filter(holds, linear_paths(model)):
        weight, bias = weights_of(model.get_submodule(path))
        placement = choose(path, weight, bias)
        if placement is not None:
            put(model, path, FrozenLinear(path, placement, (weight.shape[0], weight.shape[1]), cell))


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replaces the module at `path`."""
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def leave_file(model: nn.Module) -> None:
    """Copies a model's remaining memory-mapped tensors: while one norm is mapped, the whole file counts as
    memory in use."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def weights_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias of a linear of the model's own."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    dense = weight.data.t().contiguous() if isinstance(linear, Conv1D) else weight.data
    return dense, bias.data if isinstance(bias, Tensor) else None
