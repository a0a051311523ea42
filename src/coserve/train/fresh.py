"""Adapters that a job begins with: their weights, or their shapes alone."""

from collections.abc import Sequence

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.adapters.methods import method_of
from coserve.model.base import Base


def fresh_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """An adapter that changes nothing yet, or as little as its methods can. `config` are the settings of its
    method; of several, where it is to have several parts. Raises AdapterMismatch."""
    drawn = _drawn(base, name, config, seed)
    exact = exact_type(base.dtype)
    return drawn.with_parameters({n: p.to(base.device, exact) for n, p in drawn.parameters().items()})


def sketch_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """Returns the adapter of `fresh_adapter` with shapes alone: its tensors may only be counted.
    It takes no memory, unless a method's beginning depends on the base's weights (DoRA's norms)."""
    try:
        with torch.device("meta"):
            return _drawn(base, name, config, seed)
    except (RuntimeError, NotImplementedError):  # of mixing numbers that are there with some that are not
        return _drawn(base, name, config, seed)


def _drawn(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    generator = torch.Generator("cpu").manual_seed(seed)
    configs = config if isinstance(config, Sequence) else (config,)
    return AdapterVersion(name, 0, tuple(method_of(c).fresh(c, base, generator) for c in configs))
