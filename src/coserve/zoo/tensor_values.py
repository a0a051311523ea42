"""Tensors of torch as the zoo stores them, and back."""

from collections.abc import Mapping

from safetensors.torch import load, save
from torch import Tensor

from coserve.zoo.store import Zoo
from coserve.zoo.weight_file import header_of, weights_in


def store_tensors(zoo: Zoo, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Stores tensors and returns their ids by name. The caller holds the zoo's lock. Raises OSError."""
    file = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    stored = weights_in(memoryview(file)).tensors
    return {name: zoo.tensors.add(stored[name]) for name in tensors}


def read_tensors(zoo: Zoo, keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors with these ids, by name, compared with their ids. Raises ZooError."""
    stored = {name: zoo.tensors.checked(key) for name, key in keys.items()}
    file = b"".join([header_of(stored, {}), *(tensor.data for tensor in stored.values())])
    found: dict[str, Tensor] = load(file)
    return found
