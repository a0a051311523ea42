"""Adapter versions, which are immutable once published."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses, Part, Place
from coserve.adapters.virtual import Virtual


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """Version `version` of adapter `name`: an ordered list of parts, each of one method."""

    name: str
    version: int
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def whole(self) -> "AdapterVersion":
        """Itself; of what one stage of a pipeline has (`staged.StagePart`) all of it, as shapes alone."""
        return self

    @cached_property
    def bypasses(self) -> Bypasses:
        """Bypasses by place, of all parts together."""
        return Bypasses.of(self.placed())

    @cached_property
    def virtual(self) -> Virtual:
        """Virtual tokens, which precede every sequence."""
        return Virtual.of(self.placed())

    def placed(self) -> Iterator[tuple[Place, Bypass]]:
        """Every bypass and its place, part by part."""
        for part in self.parts:
            yield from part.bypasses.items()

    def named(self) -> Iterator[tuple[str, Place, Bypass, str]]:
        """The name of every trained parameter in `parameters`, with its bypass and the name there; a shared
        one is there for each of its bypasses."""
        for number, part in enumerate(self.parts):
            for full, place, bypass, name in part.named():
                yield f"{self._prefix(number)}{full}", place, bypass, name

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name; with several parts the names begin with the part's number."""
        return {
            f"{self._prefix(number)}{name}": tensor
            for number, part in enumerate(self.parts)
            for name, tensor in part.parameters()
        }

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "AdapterVersion":
        """Returns the adapter with other tensors under the same names."""
        parts = []
        for number, part in enumerate(self.parts):
            prefix = self._prefix(number)
            own = {name: parameters[prefix + name] for name, _ in part.parameters()}
            parts.append(part.with_parameters(own))
        return replace(self, parts=tuple(parts))

    def in_type(self, dtype: torch.dtype, copy: bool = False) -> "AdapterVersion":
        """Returns the adapter for a base in `dtype`; with `copy` also tensors of that type are copied."""
        return replace(self, parts=tuple(part.in_type(dtype, copy) for part in self.parts))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors, those included that never train, and of what is made of them."""
        bypasses = [bypass for _, bypass in self.placed()]
        fixed = {id(tensor): tensor.nbytes for bypass in bypasses for tensor in bypass.fixed}
        trained = sum(tensor.nbytes for tensor in self.parameters().values())
        return trained + sum(fixed.values()) + sum(bypass.made for bypass in bypasses)

    def _prefix(self, number: int) -> str:
        return "" if len(self.parts) == 1 else f"{number}:"
