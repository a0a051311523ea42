"""The frozen parameters of a model or of one of its blocks: tensors by module, and their placements."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from coserve.model.placement import Placed, Placement


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """Tensors of one module on this device, buffers included, by name: in the layout of its `placement`, or
    of the module itself where that is None. A remote placement holds none here."""

    tensors: Mapping[str, Tensor]
    placement: Placement | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, shared ones included."""
        return held_bytes([self])


def parameters_of(root: nn.Module) -> dict[str, ModuleParameters]:
    """All modules under `root` (itself: "") that have parameters or buffers of their own, by name."""
    found = {}
    for name, module in root.named_modules():
        if isinstance(module, Placed):
            found[name] = ModuleParameters(module.placement.tensors(), module.placement)
        elif own := dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]):
            found[name] = ModuleParameters(own)
    return found


def held_bytes(parameters: Iterable[ModuleParameters]) -> int:
    """Bytes of these parameters, shared storage counted once."""
    tensors = [tensor for own in parameters for tensor in own.tensors.values()]
    return sum({_storage(tensor): _storage_bytes(tensor) for tensor in tensors}.values())


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's memory; packed tensors have no torch storage."""
    if tensor.is_mkldnn:
        return id(tensor)
    pointer: int = tensor.untyped_storage()._cdata  # defined for tensors without data, too
    return pointer


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.is_mkldnn else tensor.untyped_storage().nbytes()
