"""An adapter's identity and its versions. A version never changes once it is published."""

from collections.abc import Mapping
from dataclasses import dataclass

from coserve.adapters.methods.lora import LoRABypass, LoRAConfig


@dataclass(frozen=True, slots=True, eq=False)
class AdapterVersion:
    """Version `version` of adapter `name`: its bypasses by the path of the linear they stand beside."""

    name: str
    version: int
    config: LoRAConfig
    bypasses: Mapping[str, LoRABypass]

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for bypass in self.bypasses.values() for p in bypass.parameters())
