"""Virtual tokens, which an adapter puts before every sequence in inference and training.

There are two kinds. *Given* ones are keys and values of every layer, without queries (prefix tuning).
*Prompts* are rows of input embeddings, which pass through the model like tokens (prompt tuning, P-tuning). An
adapter may have both; then the given ones come first. They take positions from 0 on, before a sequence's own
tokens, and count in sliding windows.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses, Place, SequentialBypass
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterMismatch

Pair = tuple[Tensor, Tensor]  # keys [groups, n, dk] and values [groups, n, dv] of one layer


class VirtualTokens(Bypass):
    """Virtual tokens as a bypass at the embedding that leaves other tokens' embeddings unchanged."""

    @property
    @abstractmethod
    def count(self) -> int: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y


class Given(VirtualTokens):
    """Virtual tokens that are keys and values, used without applying rotary embedding."""

    @abstractmethod
    def caches(self) -> list[Pair]:
        """Virtual keys and values by layer, differentiable."""


class Prompt(VirtualTokens):
    """Virtual tokens that are rows of input embeddings."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Embeddings [count, width], differentiable, before the model scales them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Embedded(Bypass):
    """Replaces the embeddings of the first `count` rows by a prompt's rows."""

    prompt: "Virtual"
    start: int
    count: int

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def with_parameters(self, parameters: object) -> "_Embedded":
        return self

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.prompt.rows()[self.start : self.start + self.count]
        return torch.cat([rows.to(y.dtype), y[self.count :]])

    def add_(self, x: Tensor, y: Tensor) -> None:
        y[: self.count] = self.prompt.rows()[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True, eq=False)
class Virtual:
    """All virtual tokens of an adapter; `path` is the embedding's."""

    path: str
    givens: tuple[Given, ...] = ()
    prompts: tuple[Prompt, ...] = ()

    @staticmethod
    def of(placed: Iterable[tuple[Place, Bypass]]) -> "Virtual":
        found = [(place.path, bypass) for place, bypass in placed if isinstance(bypass, VirtualTokens)]
        return Virtual(
            found[0][0] if found else "",
            tuple(bypass for _, bypass in found if isinstance(bypass, Given)),
            tuple(bypass for _, bypass in found if isinstance(bypass, Prompt)),
        )

    @property
    def given_count(self) -> int:
        """Number of virtual tokens given as keys and values."""
        return sum(given.count for given in self.givens)

    @property
    def prompt_count(self) -> int:
        """Number of virtual tokens that pass through the model."""
        return sum(prompt.count for prompt in self.prompts)

    @property
    def count(self) -> int:
        return self.given_count + self.prompt_count

    def caches(self) -> tuple[Pair, ...]:
        """Keys and values of the given tokens by layer, differentiable; empty where there are none."""
        by_part = [given.caches() for given in self.givens]
        if len(by_part) == 1:
            return tuple(by_part[0])
        return tuple(
            (torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1))
            for pairs in zip(*by_part, strict=True)
        )

    def rows(self) -> Tensor:
        """The prompts' embeddings [prompt_count, width], differentiable."""
        return torch.cat([prompt.rows() for prompt in self.prompts])

    def embedded(self, bypasses: Bypasses, start: int, count: int) -> Bypasses:
        """`bypasses` for a run whose first `count` rows are those of the prompts from `start` on."""
        if not count:
            return bypasses
        rows = _Embedded(self, start, count)
        before = bypasses.outputs.get(self.path)
        links = () if before is None else before.links if isinstance(before, SequentialBypass) else (before,)
        return replace(bypasses, outputs={**bypasses.outputs, self.path: SequentialBypass((*links, rows))})


def prompt_site(frame: Frame) -> Site:
    """The base's input embedding, before whose rows virtual tokens stand. Raises AdapterMismatch, also for a
    base that has more than keys and values of what comes before."""
    if frame.mixers:
        raise AdapterMismatch("virtual tokens do not go with recurrent layers, whose states no page holds")
    return embedding_of(frame)


def embedding_of(frame: Frame) -> Site:
    """The base's input embedding. Raises AdapterMismatch where it has none."""
    for site in frame.sites.values():
        if site.kind is Kind.EMBEDDING:
            return site
    raise AdapterMismatch("the adapter needs an input embedding, and this model's gives something else")
