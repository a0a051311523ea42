"""A bypass: a small network beside one place of the frozen base, `y + f(x, y)` (FlexLLM 4.1, figure 8).

What a method adds to a model is nothing but bypasses, so the base stays as it is, rows of other adapters
never notice, and one batch can hold rows of any mix of methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from coserve.errors import AdapterError
from coserve.kernels.dropout import Mask

_Self = TypeVar("_Self", bound="Bypass")


class Side(Enum):
    """Side of a module of the base at which a bypass stands.

    INPUT: x and y are what the module is given. OUTPUT: x is what it is given (for a norm or a sublayer what
    it gives), y what it gives. PAST: keys and values before a layer's own, at its attention. PROMPT: rows of
    input embeddings before a sequence's own, at the embedding.
    """

    INPUT = "input"
    OUTPUT = "output"
    PAST = "past"
    PROMPT = "prompt"


class Place(NamedTuple):
    """A side of the module at `path`."""

    path: str
    side: Side = Side.OUTPUT


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] (of an embedding [vocabulary, width], of a norm [width]) and its bias, if any."""

    weight: Tensor
    bias: Tensor | None


class Bypass(ABC):
    """One adapter's side of one place. Its tensors never change; training makes a new one of them.

    `dropout` is the probability that training drops f's input with. `exact` tensors are few, and changes to
    them small beside them (a scale near 1, a bias): they stay in at least float32 where the base is in less.
    """

    exact: ClassVar[bool] = False
    dropout: float = 0.0
    note: str = ""  # what is worth saying when somebody trains it further

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters that train, by names that are unique at the place."""

    @abstractmethod
    def with_parameters(self: _Self, parameters: Mapping[str, Tensor]) -> _Self:
        """Returns the bypass with other tensors under the same names."""

    def in_type(self: _Self, dtype: torch.dtype, copy: bool = False) -> _Self:
        """Returns the bypass for a base in `dtype`."""
        own = exact_type(dtype) if self.exact else dtype
        return self.with_parameters({n: p.to(own, copy=copy) for n, p in self.parameters().items()})

    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """y + f(x, y), differentiable; x [rows, in], y [rows, out]."""

    def add_(self, x: Tensor, y: Tensor) -> None:
        """`add` in place and without a graph. Methods replace it where they know a faster way."""
        y.copy_(self.add(x, y))

    def dropping(self, mask: Mask) -> "Bypass":
        """Returns the bypass with its input dropped out, for some rows of a training step."""
        raise NotImplementedError(f"{type(self).__name__} has no dropout")

    def merged(self, dense: Dense, side: Side) -> Dense:
        """The module's weights with this bypass, on that side of it, written into them. Raises AdapterError
        where no weights do the same."""
        raise AdapterError(f"a {type(self).__name__} cannot be written into a model's weights")


@dataclass(frozen=True, slots=True, eq=False)
class SequentialBypass(Bypass):
    """Several bypasses of one adapter at one place; each sees what the one before made of y. Within a part
    the names of their parameters differ."""

    links: Sequence[Bypass]
    dropout: float = 0.0

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor for bypass in self.links for name, tensor in bypass.parameters().items()}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "SequentialBypass":
        links = [b.with_parameters({n: parameters[n] for n in b.parameters()}) for b in self.links]
        return SequentialBypass(links, self.dropout)

    def in_type(self, dtype: torch.dtype, copy: bool = False) -> "SequentialBypass":
        return SequentialBypass([b.in_type(dtype, copy) for b in self.links], self.dropout)

    def add_(self, x: Tensor, y: Tensor) -> None:
        for bypass in self.links:
            bypass.add_(x, y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        for bypass in self.links:
            y = bypass.add(x, y)
        return y

    def dropping(self, mask: Mask) -> "SequentialBypass":
        return SequentialBypass([b.dropping(mask) if b.dropout else b for b in self.links])

    def merged(self, dense: Dense, side: Side) -> Dense:
        for bypass in self.links:
            dense = bypass.merged(dense, side)
        return dense


@dataclass(frozen=True, slots=True, eq=False)
class Bypasses:
    """An adapter as rows meet it: what stands where, by the path of the module."""

    inputs: Mapping[str, Bypass] = field(default_factory=dict)
    outputs: Mapping[str, Bypass] = field(default_factory=dict)

    @staticmethod
    def of(placed: Iterable[tuple[Place, Bypass]]) -> "Bypasses":
        found: dict[Side, dict[str, list[Bypass]]] = {side: {} for side in Side}
        for place, bypass in placed:
            found[place.side].setdefault(place.path, []).append(bypass)
        return Bypasses(_chained(found[Side.INPUT]), _chained(found[Side.OUTPUT]))

    def touches(self, paths: Collection[str]) -> bool:
        """Tells whether anything stands at one of these modules."""
        return any(path in self.outputs or path in self.inputs for path in paths)


def _chained(by_path: Mapping[str, list[Bypass]]) -> dict[str, Bypass]:
    return {
        path: links[0] if len(links) == 1 else SequentialBypass(tuple(links))
        for path, links in by_path.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Part of an adapter that one method adds: `config` are its settings, a dataclass of the method's file.

    An adapter is an ordered list of these; a prefix and a LoRA together are one adapter.
    """

    method: str
    config: object
    bypasses: Mapping[Place, Bypass]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that train, under names that a checkpoint can keep."""
        for place, bypass in self.bypasses.items():
            for name, tensor in bypass.parameters().items():
                yield f"{place.path}.{name}", tensor

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "Part":
        """Returns the part with other tensors under the same names."""
        made = {
            place: bypass.with_parameters({n: parameters[f"{place.path}.{n}"] for n in bypass.parameters()})
            for place, bypass in self.bypasses.items()
        }
        return Part(self.method, self.config, made)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """The type that weights are trained, added up and saved in: at least float32."""
    return torch.promote_types(dtype, torch.float32)
