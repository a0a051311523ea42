"""LoKr: y + (alpha / rank) (W1 ⊗ W2) x, a Kronecker product whose large factor may be of low rank. Yeh et al.
2023, 2309.14859 (LyCORIS).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from torch import Generator, Tensor

from coserve.adapters.linears import (
    AddingBypass,
    LinearConfig,
    LinearMethod,
    Shapes,
    Varies,
    pieces,
    uniform,
    zeros,
)
from coserve.adapters.method import MOST_ALPHA, MOST_RANK
from coserve.adapters.sites import Site
from coserve.core.setting import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class LoKrConfig(LinearConfig):
    """Settings of LoKr.

    Inputs and outputs are factored as close to `decompose_factor` as they can be, -1 for their roots. The
    second factor's matrix is of low rank where `rank` is below half of its longer side; with `decompose_both`
    the first one's, too.
    """

    rank: Annotated[int, Range(1, MOST_RANK)] = 8
    alpha: Annotated[float, Range(-MOST_ALPHA, MOST_ALPHA)] = 8.0
    decompose_both: bool = False
    decompose_factor: Annotated[int, Range(-1, MOST_RANK)] = -1
    rank_pattern: Annotated[Mapping[str, int], Varies("rank")] = field(default_factory=dict)
    alpha_pattern: Annotated[Mapping[str, float], Varies("alpha")] = field(default_factory=dict)


class LoKrBypass(AddingBypass[LoKrConfig]):
    """`lokr_w1` [a, c] and `lokr_w2` [b, d], or each as a product of two, beside a linear of a·b outputs and
    c·d inputs."""

    def product(self, x: Tensor) -> Tensor:
        left, right = self._factor("lokr_w1"), self._factor("lokr_w2")
        inner = pieces(x, right.shape[1]) @ right.t()
        product: Tensor = left @ inner
        return product.flatten(-2) * (self.settings.alpha / self.settings.rank)

    def _factor(self, name: str) -> Tensor:
        whole = self.tensors.get(name)
        return self.tensors[f"{name}_a"] @ self.tensors[f"{name}_b"] if whole is None else whole


class LoKr(LinearMethod[LoKrConfig]):
    """Kronecker products."""

    name, peft_type, config, bypass = "lokr", "LOKR", LoKrConfig, LoKrBypass
    aliases: Mapping[str, str] = {"r": "rank", "target_modules": "targets"}
    ignored = ("init_weights", "use_effective_conv2d", "rank_dropout_scale")
    forgone = ("rank_dropout", "module_dropout")

    def shapes(self, settings: LoKrConfig, site: Site) -> Shapes:
        rank = settings.rank
        a, b = factors(site.outputs, settings.decompose_factor)
        c, d = factors(site.inputs, settings.decompose_factor)
        shapes: Shapes = {}
        for name, rows, columns, is_split in (
            ("lokr_w1", a, c, settings.decompose_both),
            ("lokr_w2", b, d, True),
        ):
            if is_split and rank < max(rows, columns) / 2:
                shapes |= {f"{name}_a": (rows, rank), f"{name}_b": (rank, columns)}
            else:
                shapes[name] = rows, columns
        return shapes

    def draw(self, settings: LoKrConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        zero = ("lokr_w1", "lokr_w1_a")
        return {n: zeros(s) if n in zero else uniform(s, generator) for n, s in shapes.items()}


def factors(size: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is `size`: the given factor and the other, where it is one; else the smaller
    one first, of those up to the factor (-1: any) the pair with the least sum."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = math.isqrt(size) if factor == -1 else min(math.isqrt(size), factor)
    small = max(n for n in range(1, max(most, 1) + 1) if size % n == 0)
    return small, size // small


METHOD = LoKr()
