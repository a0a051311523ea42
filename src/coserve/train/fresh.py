"""Initial adapters of jobs: with their weights, or as shapes alone."""

from collections.abc import Sequence

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.adapters.methods import method_of
from coserve.errors import AdapterMismatch
from coserve.model.base import Base


def fresh_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """An adapter whose initial effect is none, or as small as its methods allow. `config` is the settings of
    its method, or of each of its parts. Raises AdapterMismatch."""
    drawn = _drawn(base, name, config, seed)
    exact = exact_type(base.dtype)
    return drawn.with_parameters({n: p.to(base.device, exact) for n, p in drawn.parameters().items()})


def sketch_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """Returns the adapter of `fresh_adapter` as shapes alone: its tensors may only be counted. It takes no
    memory, unless a method's initial weights depend on the base's weights (DoRA's norms)."""
    try:
        with torch.device("meta"):
            return _drawn(base, name, config, seed)
    except (RuntimeError, NotImplementedError):  # from mixing tensors with data and without
        return _drawn(base, name, config, seed)


def _drawn(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    if not base.sites:
        raise AdapterMismatch("no module of this base takes an adapter: a chain of two bases answers only")
    generator = torch.Generator("cpu").manual_seed(seed)
    configs = config if isinstance(config, Sequence) else (config,)
    return AdapterVersion(name, 0, tuple(method_of(c).fresh(c, base.frame, generator) for c in configs))
