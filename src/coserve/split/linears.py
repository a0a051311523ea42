"""The frozen linears of a model: their paths, siblings and content hash, alike for executor and client."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.errors import UnsupportedModel
from coserve.model.contents import Contents, contents_of
from coserve.model.origin import digest_of

# Names of linears that get the same input within one module. All others are computed alone.
_SIBLINGS: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_GROUP: Final = {name: names[0] for names in _SIBLINGS for name in names}


def find_linears(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Linears of exact type, by their path in the transformers model without adapters; with their path here.

    `model` may be wrapped by PEFT, whose own linears are left out. Raises UnsupportedModel where there is
    no transformers model.
    """
    start, own = transformers_model(model)
    wrapped = {name: child for name, module in own.named_modules() if (child := _wrapped_child(module))}
    found = {}
    for path, module in own.named_modules():
        if type(module) in (nn.Linear, Conv1D) and (bare := _bare(path, wrapped)) is not None:
            found[bare] = f"{start}.{path}".removeprefix("."), module
    return found


def transformers_model(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """The path and the transformers model in one that PEFT may have wrapped. Raises UnsupportedModel."""
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return path, module
    raise UnsupportedModel(f"a {type(model).__name__} contains no model of transformers")


def _wrapped_child(module: nn.Module) -> str | None:
    """The child that is the base's own module, where PEFT has put another around it."""
    children = dict(module.named_children())
    return next((name for name in ("base_layer", "original_module") if name in children), None)


def _bare(path: str, wrapped: Mapping[str, str]) -> str | None:
    """The path without wrappers; None for modules that belong to one."""
    here, bare = "", []
    for name in path.split("."):
        if here not in wrapped:
            bare.append(name)
        elif name != wrapped[here]:
            return None
        here = f"{here}.{name}".removeprefix(".")
    return ".".join(bare)


def grouped(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """Paths of linears, those with the same input together, given the widths of output and input."""
    groups: dict[tuple[str, int], list[str]] = {}
    for path, (_, inputs) in shapes.items():
        parent, _, name = path.rpartition(".")
        groups.setdefault((f"{parent}.{_GROUP.get(name, name)}", inputs), []).append(path)
    return [tuple(group) for group in groups.values()]


def shape_of(linear: nn.Module) -> tuple[int, int]:
    """Widths of output and input."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    return (
        (weight.shape[1], weight.shape[0])
        if isinstance(linear, Conv1D)
        else (weight.shape[0], weight.shape[1])
    )


def digests_of(
    linears: Mapping[str, nn.Module], hashed: Callable[[Mapping[str, Tensor]], Contents] = contents_of
) -> dict[str, str] | None:
    """Content hash of each linear by its path, of whole tensors, as `hashed` gives those; None where a weight
    has no data."""
    tensors = {path: dict(linear.named_parameters(recurse=False)) for path, linear in linears.items()}
    every = {f"{path}.{name}": tensor for path, own in tensors.items() for name, tensor in own.items()}
    if any(tensor.is_meta for tensor in every.values()):
        return None
    contents = hashed(every)
    return {
        path: digest_of({name: contents[f"{path}.{name}"] for name in own}) for path, own in tensors.items()
    }
