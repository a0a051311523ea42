"""Bypasses beside a linear that is cut over ranks, where a rank's part is more than the bypass of cut
tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass
from coserve.adapters.linears import LinearBypass
from coserve.kernels.dropout import Mask
from coserve.parallel.ranks import ONE_PIECE, Pieces, Ranks
from coserve.parallel.states import NO_CHANGE, ChangePair

_Self = TypeVar("_Self", bound="OnRank")


@dataclass(frozen=True, eq=False)
class OnRank(Bypass):
    """A rank's part of `bypass`, with that one's tensors."""

    bypass: Bypass
    ranks: Ranks
    dropout: float = 0.0

    def parameters(self) -> Mapping[str, Tensor]:
        return self.bypass.parameters()

    def with_parameters(self: _Self, parameters: Mapping[str, Tensor]) -> _Self:
        return replace(self, bypass=self.bypass.with_parameters(parameters))

    def in_type(self: _Self, dtype: torch.dtype, copy: bool = False) -> _Self:
        return replace(self, bypass=self.bypass.in_type(dtype, copy))

    @property
    def shared(self) -> frozenset[str]:  # type: ignore[override]  # of the class of the bypass
        return self.bypass.shared

    @property
    def fixed(self) -> Collection[Tensor]:
        return self.bypass.fixed

    @property
    def made(self) -> int:
        return self.bypass.made

    @property
    def saved(self) -> int:
        return self.bypass.saved

    @property
    def replaces(self) -> bool:
        return self.bypass.replaces

    def dropping(self: _Self, mask: Mask) -> _Self:
        return replace(self, bypass=self.bypass.dropping(mask))


@dataclass(frozen=True, eq=False)
class MappedOnRank(OnRank):
    """A linear function of whole rows, of what is cut: rows change before and behind it, forward and back.
    The outputs of the linear are cut in each of `pieces`."""

    entering: ChangePair = NO_CHANGE
    leaving: ChangePair = NO_CHANGE
    pieces: Pieces = ONE_PIECE

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        bypass = self.bypass
        assert isinstance(bypass, LinearBypass)
        reads_x = bypass.reads_input
        given = self.ranks.changed(x if reads_x else y, *self.entering, ONE_PIECE if reads_x else self.pieces)
        return y + self.ranks.changed(bypass.given(given), *self.leaving, self.pieces).to(y.dtype)

    def dropping(self, mask: Mask) -> "MappedOnRank":
        return super().dropping(replace(mask, part=(0, 1)))  # of whole rows


@dataclass(frozen=True, eq=False)
class FirstAdds(OnRank):
    """A bypass whose `biases` the first rank alone adds, to outputs that are sums over ranks. All have their
    gradients."""

    biases: tuple[str, ...] = ()

    @property
    def _own(self) -> Bypass:
        found = {**self.parameters()}
        return self.bypass.with_parameters(found | {n: self.ranks.once(found[n]) for n in self.biases})

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._own.add(x, y)

    def add_(self, x: Tensor, y: Tensor) -> None:
        self._own.add_(x, y)

    def instead(self, x: Tensor) -> Tensor:
        return self._own.instead(x)
