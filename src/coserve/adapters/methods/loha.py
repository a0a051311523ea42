"""LoHa: y + (alpha / rank) ((W1a W1b) ⊙ (W2a W2b)) x, an elementwise product of two low-rank matrices.
Hyeon-Woo et al. 2022, 2108.06098 (FedPara); Yeh et al. 2023, 2309.14859 (LyCORIS).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import torch.nn.functional as F
from torch import Generator, Tensor

from coserve.adapters.linears import AddingBypass, LinearConfig, LinearMethod, Shapes, Varies, uniform, zeros
from coserve.adapters.method import MOST_ALPHA, MOST_RANK
from coserve.adapters.sites import Site
from coserve.core.setting import Range

_FACTORS: Final = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoHaConfig(LinearConfig):
    """Settings of LoHa: the rank of each of the two matrices, and alpha, by whose quotient their product is
    multiplied."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 8
    alpha: Annotated[float, Range(-MOST_ALPHA, MOST_ALPHA)] = 8.0
    rank_pattern: Annotated[Mapping[str, int], Varies("rank")] = field(default_factory=dict)
    alpha_pattern: Annotated[Mapping[str, float], Varies("alpha")] = field(default_factory=dict)


class LoHaBypass(AddingBypass[LoHaConfig]):
    """Factors a [out, rank] and b [rank, in] of two matrices."""

    def product(self, x: Tensor) -> Tensor:
        """The product with a matrix of rank² at most, or with the whole where that is less."""
        a1, b1, a2, b2 = (self.tensors[name] for name in _FACTORS)
        rank, scale = len(b1), self.settings.alpha / self.settings.rank
        outputs, inputs = len(a1), b1.shape[1]
        if rank * rank * (outputs + inputs) >= outputs * inputs:
            return F.linear(x, (a1 @ b1) * (a2 @ b2)) * scale
        down = (b1[:, None] * b2).flatten(0, 1)
        up = (a1[:, :, None] * a2[:, None]).flatten(1)
        return F.linear(F.linear(x, down), up) * scale


class LoHa(LinearMethod[LoHaConfig]):
    """Elementwise products of low-rank matrices."""

    name, peft_type, config, bypass = "loha", "LOHA", LoHaConfig, LoHaBypass
    aliases: Mapping[str, str] = {"r": "rank", "target_modules": "targets"}
    ignored = ("init_weights", "use_effective_conv2d")
    forgone = ("rank_dropout", "module_dropout")

    def shapes(self, settings: LoHaConfig, site: Site) -> Shapes:
        both = (site.outputs, settings.rank), (settings.rank, site.inputs)
        return dict(zip(_FACTORS, (*both, *both), strict=True))

    def draw(self, settings: LoHaConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {n: zeros(s) if n == _FACTORS[-1] else uniform(s, generator) for n, s in shapes.items()}


METHOD = LoHa()
