"""Weights that a client does not have. Their shapes and types are known; reading their values raises an error
with their name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.errors import NotOffered

_aten: Final = torch.ops.aten
# Copies, and moves to another type or device. Their results have no data either.
_WITHOUT_VALUES: Final = frozenset(
    (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default)
)
# Initializations of PEFT's LoRA that replace the base's weights.
_OWN_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AbsentWeight(Tensor):
    """A parameter of a linear that the executor has; reading it raises NotOffered."""

    owner: str

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, owner: str
    ) -> "AbsentWeight":
        """`owner` names the parameter in errors."""
        made: AbsentWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.owner = owner
        return made

    def __init__(self, *_: object) -> None:
        """Takes the arguments of `__new__`."""

    @staticmethod
    def instead_of(parameter: Tensor, owner: str) -> nn.Parameter:
        """A parameter with the shape, type and device of another one; on the CPU for one on the meta
        device."""
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        absent = AbsentWeight(parameter.shape, parameter.dtype, device, owner)
        return nn.Parameter(absent, requires_grad=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentWeight({self.owner}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> "AbsentWeight":
        """Raises NotOffered for operations that need values."""
        if func not in _WITHOUT_VALUES:
            owner = next(found.owner for found in _absent_of((*args, *(kwargs or {}).values())))
            raise NotOffered(
                f"{owner} is the executor's, and this process does not have it: {func} cannot read it here. "
                f"Methods that read or change the base's weights (DoRA, merging) need the whole model"
            )
        own, moved = args[0], kwargs or {}
        dtype, device = moved.get("dtype") or own.dtype, moved.get("device") or own.device
        return AbsentWeight(own.shape, dtype, torch.device(device), own.owner)


def _absent_of(found: object) -> Iterator[AbsentWeight]:
    if isinstance(found, AbsentWeight):
        yield found
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for item in found:
            yield from _absent_of(item)


def check_methods(model: nn.Module, linears: Mapping[str, nn.Module]) -> None:
    """Raises NotOffered where PEFT's adapters in the model cannot work with absent weights: those that have
    changed the base's weights, or that read or train them (`linears`, by path)."""
    is_wrapped = False
    for config in _configs_of(model):
        is_wrapped = True
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.lower().split("_niter")[0] in _OWN_BASE:
            raise NotOffered(
                f"LoRA that begins with {start!r} has changed the base's weights in this process"
            )
        if getattr(config, "use_dora", False):
            raise NotOffered("DoRA reads the base's weights, which this process does not keep")
    if is_wrapped:  # a model without adapters requires all gradients as it is loaded
        for path, module in linears.items():
            check_frozen(path, module)


def check_frozen(path: str, linear: nn.Module) -> None:
    """Raises NotOffered where a script trains weights that the executor has."""
    for name, parameter in linear.named_parameters(recurse=False):
        if parameter.requires_grad:
            raise NotOffered(f"{path}.{name} is to be trained, but the executor's weights are frozen")


def _configs_of(model: nn.Module) -> Iterator[object]:
    """PEFT's configurations of the adapters in a model."""
    found = {id(configs): configs for m in model.modules() if (configs := getattr(m, "peft_config", None))}
    for configs in found.values():
        if isinstance(configs, Mapping):
            yield from configs.values()
