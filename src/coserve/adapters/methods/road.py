"""RoAd: R y at the outputs of linears, where R turns and scales pairs of features. Liao and Monz 2024,
2409.00119.

A group's first half is paired with its second. The pair (p, q) becomes (c p − s q, s' p + c' q), with
c = α cos θ and s = α sin θ for each feature.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import torch
from torch import Generator, Tensor

from coserve.adapters.linears import LinearConfig, LinearMethod, Shapes, TurningBypass, zeros
from coserve.adapters.sites import Site
from coserve.core.setting import Range
from coserve.errors import AdapterError

_THETA, _ALPHA = "road_theta", "road_alpha"
_HALVES: Final = {"road_1": 1, "road_2": 2, "road_4": 4}  # numbers for each pair of features


@dataclass(frozen=True, slots=True, kw_only=True)
class RoAdConfig(LinearConfig):
    """Settings of RoAd: one, two or four angles and scales for each pair of features, and the features of a
    group, an even number that divides the outputs of each linear."""

    variant: Literal["road_1", "road_2", "road_4"] = "road_1"
    group_size: Annotated[int, Range(2, 1 << 20)] = 64


class RoAdBypass(TurningBypass[RoAdConfig]):
    """`road_theta` and `road_alpha`: half as many numbers as there are outputs, as many, or twice as many."""

    def change(self, y: Tensor) -> Tensor:
        half = self.settings.group_size // 2
        own, other = (factor.view(-1, 2, half).to(y.dtype) for factor in self._factors())
        pairs = y.reshape(*y.shape[:-1], -1, 2, half)
        swapped = torch.stack([-pairs[..., 1, :], pairs[..., 0, :]], dim=-2)
        return (pairs * own + swapped * other).flatten(-3)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """For each output α cos θ − 1 of its own feature, and α sin θ of its pair's other, [out]."""
        size = self.settings.group_size
        theta, alpha = self.tensors[_THETA], self.tensors[_ALPHA]
        if self.settings.variant == "road_1":
            theta, alpha = (
                each.view(-1, 1, size // 2).expand(-1, 2, -1).flatten() for each in (theta, alpha)
            )
        if self.settings.variant != "road_4":
            return alpha * theta.cos() - 1, alpha * theta.sin()
        theta, alpha = theta.view(-1, 2, size), alpha.view(-1, 2, size)
        own, other = alpha[:, 0] * theta[:, 0].cos() - 1, alpha[:, 1] * theta[:, 1].sin()
        return own.flatten(), other.flatten()


class RoAd(LinearMethod[RoAdConfig]):
    """Turned outputs."""

    name, peft_type, config, bypass = "road", "ROAD", RoAdConfig, RoAdBypass
    aliases: Mapping[str, str] = {"target_modules": "targets"}

    def shapes(self, settings: RoAdConfig, site: Site) -> Shapes:
        size = settings.group_size
        if size % 2 or site.outputs % size:
            raise AdapterError(
                f"RoAd's groups of {size} outputs, an even number, do not divide the {site.outputs} of "
                f"{site.path}"
            )
        count = site.outputs * _HALVES[settings.variant] // 2
        return {_THETA: (count,), _ALPHA: (count,)}

    def draw(self, settings: RoAdConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {_THETA: zeros(shapes[_THETA]), _ALPHA: zeros(shapes[_ALPHA]) + 1}


METHOD = RoAd()
