"""DoRA: a linear with a low-rank bypass and learned norms of its rows.

y = g ⊙ (W + s B A) x + b, with g = m / ‖W + s B A‖ for each row. Gradients leave the norm out: it counts as a
constant (Liu et al. 2024, 2402.09353, section 4.3).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Side, exact_type
from coserve.adapters.lowrank import EmbeddingLoRA, LowRank
from coserve.adapters.sites import CutWeights, Weights
from coserve.kernels.dropout import Mask
from coserve.parallel.ranks import ALONE, Ranks

MAGNITUDE = "lora_magnitude_vector"
_LARGE = 1024.0


@dataclass(frozen=True, eq=False)
class Norms:
    """‖W + scale · B A‖ of each output, computed on first use.

    Needs only W's norms and its products with A's rows, so W may be packed, quantized or remote. Where each
    of `ranks` has some inputs, squares are summed over them. `whole` are the weights of which these are a
    rank's.
    """

    weights: Weights
    lora: LowRank
    ranks: Ranks = ALONE
    whole: Weights | None = None

    @cached_property
    def values(self) -> Tensor:
        """[out], in at least float32."""
        with torch.no_grad():
            own = self.weights.row_norms()
            a, b = self.lora.a.to(own.dtype), self.lora.b.to(own.dtype)
            s = self.lora.scale
            crossed = (b * self._products().to(own.dtype)).sum(dim=1)
            squared = own.square() + 2 * s * crossed + s * s * ((b @ (a @ a.t())) * b).sum(dim=1)
            squared = self.ranks.sum(squared)
            return squared.clamp_min(torch.finfo(own.dtype).tiny).sqrt()

    def of(self, lora: LowRank) -> "Norms":
        """Those beside another low-rank part."""
        return Norms(self.weights, lora, self.ranks, self.whole)

    def _products(self) -> Tensor:
        """W Aᵀ, [out, rank]. A is scaled up by a power of two first: the product includes the bias, beside
        which a small one would lose its precision in a short type."""
        a = self.lora.a
        largest = float(a.abs().max())
        exponent = math.floor(math.log2(_LARGE / largest)) if 0.0 < largest < math.inf else 0
        factor = 2.0 ** min(max(exponent, 0), 64)
        y = self.weights.forward(a * factor)
        exact = y.to(exact_type(y.dtype))
        if self.weights.bias is not None:
            exact = exact - self.weights.bias
        return exact.t() / factor


class GivenNorms(Norms):
    """Known norms, or a tensor without values where only shapes matter."""

    def __init__(self, weights: Weights, lora: LowRank, values: Tensor) -> None:
        super().__init__(weights, lora)
        self.__dict__["values"] = values


@dataclass(frozen=True, eq=False)
class DoRABypass(Bypass):
    """`lora` and magnitude [out] beside a linear (or embedding) with these `norms`.

    Dropout applies to the low-rank part alone, so that the base's product is computed once. PEFT also drops
    the input of the base's product in its rescaled part, which is the same on average.
    """

    lora: LowRank
    magnitude: Tensor
    norms: Norms
    dropout: float = 0.0
    mask: Mask | None = None

    @staticmethod
    def of(lora: LowRank, magnitude: Tensor, weights: Weights) -> "DoRABypass":
        return DoRABypass(lora, magnitude, Norms(weights, lora), lora.dropout)

    def on(self, ranks: Ranks | None) -> "DoRABypass":
        """The bypass beside a linear that is cut: by inputs over `ranks`, or None by outputs."""
        weights = self.norms.weights
        own = weights.own if isinstance(weights, CutWeights) else weights
        whole = weights if self.norms.whole is None else self.norms.whole
        return replace(self, norms=Norms(own, self.lora, ALONE if ranks is None else ranks, whole))

    def off(self) -> "DoRABypass":
        """The bypass of the whole linear, of which a rank's part was made by `on`."""
        weights = self.norms.weights if self.norms.whole is None else self.norms.whole
        return replace(self, norms=Norms(weights, self.lora))

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self.lora.parameters(), MAGNITUDE: self.magnitude}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "DoRABypass":
        lora = self.lora.with_parameters(parameters)
        return replace(self, lora=lora, magnitude=parameters[MAGNITUDE], norms=self.norms.of(lora))

    def in_type(self, dtype: torch.dtype, copy: bool = False) -> "DoRABypass":
        """The magnitude stays exact, as its small difference from the norm matters."""
        lora = self.lora.in_type(dtype, copy)
        magnitude = self.magnitude.to(exact_type(dtype), copy=copy)
        return replace(self, lora=lora, magnitude=magnitude, norms=self.norms.of(lora))

    def with_norms(self, values: Tensor) -> "DoRABypass":
        """Returns the bypass with given norms [out], until its parameters change."""
        return replace(self, norms=GivenNorms(self.norms.weights, self.lora, values))

    def dropping(self, mask: Mask) -> "DoRABypass":
        return replace(self, mask=mask)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        gain = self._gain()
        product = y if self._bias is None else y - self._bias
        y = torch.addcmul(y, product, (gain - 1).to(y.dtype))  # to the bit what `add_` does
        return self.lora.with_outputs_scaled(gain).add(self._given(x), y)

    def add_(self, x: Tensor, y: Tensor) -> None:
        change, lora = self._constant
        product = y if self._bias is None else y - self._bias
        y.addcmul_(product, change)
        lora.add_(self._given(x), y)

    def merged(self, dense: Dense, side: Side) -> Dense:
        both, gain = self.lora.merged(dense, side), self._gain()
        per_row = gain if isinstance(self.lora, EmbeddingLoRA) else gain[:, None]
        return replace(both, weight=both.weight * per_row)

    @cached_property
    def _constant(self) -> tuple[Tensor, LowRank]:
        """g − 1, and the low-rank part scaled by g, without a graph."""
        with torch.no_grad():
            gain = self._gain()
            return (gain - 1).to(self.lora.b.dtype), self.lora.with_outputs_scaled(gain)

    @property
    def _bias(self) -> Tensor | None:
        return self.norms.weights.bias

    def _gain(self) -> Tensor:
        """g [out], differentiable in the magnitude, in at least float32."""
        values = self.norms.values
        return self.magnitude.to(values.dtype) / values

    def _given(self, x: Tensor) -> Tensor:
        return x if self.mask is None else self.mask(x)
