"""A bypass: a small network beside one place of the frozen base, `y + f(x, y)` (FlexLLM 4.1, figure 8).

Methods add only bypasses to a model: the base stays unmodified, rows of other adapters are unaffected, and a
batch can mix methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from coserve.errors import AdapterError
from coserve.kernels.dropout import Mask
from coserve.kernels.lora.backend import LoraSegment
from coserve.kernels.native.layer import OwnWeight

_Self = TypeVar("_Self", bound="Bypass")


class Side(Enum):
    """Side of a module of the base at which a bypass is added.

    INPUT: x and y are the module's input. OUTPUT: x is its input (for a norm or a sublayer its output), y its
    output. PAST: keys and values before a layer's own, at its attention. PROMPT: rows of input embeddings
    before a sequence's own, at the embedding.
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
    """A dense weight [out, in] (embedding: [vocabulary, width], norm: [width]) and its bias, if any."""

    weight: Tensor
    bias: Tensor | None


class InTypes(dict[torch.dtype, Tensor]):
    """A tensor in each type that was asked for, made once by `make`."""

    def __init__(self, make: Callable[[torch.dtype], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        return self.setdefault(dtype, self._make(dtype))


class Bypass(ABC):
    """One adapter's bypass at one place, immutable; training makes new ones.

    `dropout` is the dropout probability of f's input in training. `exact` tensors are small and change little
    relative to their values (a scale near 1, a bias): they stay in at least float32 on a base of lower
    precision.
    """

    exact: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset()  # names of parameters that all of a part have together
    dropout: float = 0.0
    note: str = ""  # what is worth saying when somebody trains it further

    @property
    def replaces(self) -> bool:
        """Tells whether the output depends on the module's input alone: `instead` gives it."""
        return False

    @property
    def saved(self) -> int:
        """Bytes of the module's own parameters, where the bypass `replaces` it; else none."""
        return 0

    @property
    def fixed(self) -> Collection[Tensor]:
        """Tensors of the adapter's own that never train; its other bypasses may have the same ones."""
        return ()

    @property
    def made(self) -> int:
        """Bytes of what it makes of its parameters at its first use, and keeps."""
        return 0

    def replayed(self, rows: int, dtype: torch.dtype) -> int:
        """The most bytes that it takes for so many rows on their way back, beside what a linear or sublayer
        takes in any case."""
        return 0

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """Trained parameters by names unique at the place."""

    @abstractmethod
    def with_parameters(self: _Self, parameters: Mapping[str, Tensor]) -> _Self:
        """Returns the bypass with other tensors under the same names."""

    def in_type(self: _Self, dtype: torch.dtype, copy: bool = False) -> _Self:
        """Returns the bypass for a base in `dtype`."""
        own = exact_type(dtype) if self.exact else dtype
        return self.with_parameters({n: p.to(own, copy=copy) for n, p in self.parameters().items()})

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight | None:
        """The bypass of a range of rows of this type at one side of a linear or norm, for the kernel of a
        whole layer; None where it does not read it so."""
        return None

    def segment(self, rows: slice) -> LoraSegment | None:
        """The bypass of a range of rows at a sublayer's output, for the kernel of a whole layer; None where
        it does not read it so."""
        return None

    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """y + f(x, y), differentiable; x [rows, in], y [rows, out]."""

    def add_(self, x: Tensor, y: Tensor) -> None:
        """`add` in place and without a graph. Methods override it where they have a faster way."""
        y.copy_(self.add(x, y))

    def instead(self, x: Tensor) -> Tensor:
        """The module's output [rows, out] for x [rows, in], where the bypass `replaces` the module; without a
        graph."""
        raise NotImplementedError(f"{type(self).__name__} adds to what the module gives")

    def dropping(self, mask: Mask) -> "Bypass":
        """Returns the bypass with dropout `mask` on its input, for some rows of a training step."""
        raise NotImplementedError(f"{type(self).__name__} has no dropout")

    def merged(self, dense: Dense, side: Side) -> Dense:
        """The module's weights with this bypass, at `side`, merged into them. Raises AdapterError where it
        cannot be merged."""
        raise AdapterError(f"a {type(self).__name__} cannot be written into a model's weights")


@dataclass(frozen=True, slots=True, eq=False)
class SequentialBypass(Bypass):
    """Several bypasses of one adapter at one place, applied to y in order. Their parameter names differ."""

    links: Sequence[Bypass]
    dropout: float = 0.0

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor for bypass in self.links for name, tensor in bypass.parameters().items()}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "SequentialBypass":
        links = [b.with_parameters({n: parameters[n] for n in b.parameters()}) for b in self.links]
        return SequentialBypass(links, self.dropout)

    def in_type(self, dtype: torch.dtype, copy: bool = False) -> "SequentialBypass":
        return SequentialBypass([b.in_type(dtype, copy) for b in self.links], self.dropout)

    @property
    def fixed(self) -> Collection[Tensor]:
        return [tensor for bypass in self.links for tensor in bypass.fixed]

    @property
    def made(self) -> int:
        return sum(bypass.made for bypass in self.links)

    def replayed(self, rows: int, dtype: torch.dtype) -> int:
        return sum(bypass.replayed(rows, dtype) for bypass in self.links)

    @property
    def replaces(self) -> bool:
        return any(bypass.replaces for bypass in self.links)

    def instead(self, x: Tensor) -> Tensor:
        last = max(place for place, bypass in enumerate(self.links) if bypass.replaces)
        y = self.links[last].instead(x)
        for bypass in self.links[last + 1 :]:
            bypass.add_(x, y)
        return y

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
    """An adapter's bypasses by the path of their module."""

    inputs: Mapping[str, Bypass] = field(default_factory=dict)
    outputs: Mapping[str, Bypass] = field(default_factory=dict)

    @staticmethod
    def of(placed: Iterable[tuple[Place, Bypass]]) -> "Bypasses":
        found: dict[Side, dict[str, list[Bypass]]] = {side: {} for side in Side}
        for place, bypass in placed:
            found[place.side].setdefault(place.path, []).append(bypass)
        return Bypasses(_chained(found[Side.INPUT]), _chained(found[Side.OUTPUT]))

    def touches(self, paths: Collection[str]) -> bool:
        """Tells whether any of these modules has a bypass."""
        return any(path in self.outputs or path in self.inputs for path in paths)


def _chained(by_path: Mapping[str, list[Bypass]]) -> dict[str, Bypass]:
    return {
        path: links[0] if len(links) == 1 else SequentialBypass(tuple(links))
        for path, links in by_path.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The part of an adapter of one method; `config` are its settings, a dataclass of the method's file.

    An adapter is an ordered list of parts, for example a prefix and a LoRA.
    """

    method: str
    config: object
    bypasses: Mapping[Place, Bypass]

    def named(self) -> Iterator[tuple[str, Place, Bypass, str]]:
        """Names of trained parameters, stable across checkpoints, with their bypass and their names there; a
        shared one is there for each of its bypasses."""
        for place, bypass in self.bypasses.items():
            for name in bypass.parameters():
                yield _name(place, bypass, name), place, bypass, name

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Trained parameters by these names; a shared one is there once."""
        yield from {full: bypass.parameters()[name] for full, _, bypass, name in self.named()}.items()

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "Part":
        """Returns the part with other tensors under the same names."""
        made = {
            place: bypass.with_parameters(
                {n: parameters[_name(place, bypass, n)] for n in bypass.parameters()}
            )
            for place, bypass in self.bypasses.items()
        }
        return Part(self.method, self.config, made)

    def in_type(
        self, dtype: torch.dtype, copy: bool = False, rest: Callable[[], None] = lambda: None
    ) -> "Part":
        """Returns the part for a base in `dtype`; `rest` is called after each bypass."""
        made = {}
        for place, bypass in self.bypasses.items():
            made[place] = bypass.in_type(dtype, copy)
            rest()
        found = Part(self.method, self.config, made)
        is_shared = any(bypass.shared for bypass in made.values())  # then each has converted one of its own
        return found.with_parameters(dict(found.parameters())) if is_shared else found


def _name(place: Place, bypass: Bypass, name: str) -> str:
    return name if name in bypass.shared else f"{place.path}.{name}"


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """The type for master weights, sums and saved tensors: at least float32."""
    return torch.promote_types(dtype, torch.float32)
