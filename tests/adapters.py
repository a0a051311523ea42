"""Adapters made by hand."""

from collections.abc import Mapping

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Bypasses, Part, Place
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.stored import KnownVersion, Outline


def lora_adapter(
    name: str, version: int, config: LoRAConfig, bypasses: Mapping[str, LoRABypass]
) -> AdapterVersion:
    """One part, at the outputs of the linears named."""
    placed: dict[Place, Bypass] = {Place(path): bypass for path, bypass in bypasses.items()}
    return AdapterVersion(name, version, (Part("lora", config, placed),))


def known(adapter: AdapterVersion) -> KnownVersion:
    """A version whose weights are on the device and in no file."""
    return KnownVersion(adapter.name, adapter.version, Outline.of(adapter))


def at_outputs(bypasses: Mapping[str, Bypass]) -> Bypasses:
    return Bypasses.of((Place(path), bypass) for path, bypass in bypasses.items())
