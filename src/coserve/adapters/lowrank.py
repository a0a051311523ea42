"""Low-rank bypasses: f(x) = scale · B (A x) beside a linear, and beside the input embedding."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from coserve.adapters.bypass import Bypass, Dense, Side, exact_type
from coserve.adapters.saved import Saved, expect_shape, site_at
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError
from coserve.kernels.dropout import Mask


@dataclass(frozen=True, slots=True, eq=False)
class LoRABypass(Bypass):
    """Matrices a [rank, in] and b [out, rank], and optionally a bias [out] of b, which is scaled, too."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    bias: Tensor | None = None

    def parameters(self) -> Mapping[str, Tensor]:
        matrices = {"lora_A": self.a, "lora_B": self.b}
        return matrices if self.bias is None else {**matrices, "lora_B.bias": self.bias}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "LoRABypass":
        return replace(
            self, a=parameters["lora_A"], b=parameters["lora_B"], bias=parameters.get("lora_B.bias")
        )

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.addmm_(x @ self.a.t(), self.b.t(), alpha=self.scale)
        if self.bias is not None:
            y.add_(self.bias, alpha=self.scale)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        y = torch.addmm(y, x @ self.a.t(), self.b.t(), alpha=self.scale)
        return y if self.bias is None else y.add(self.bias, alpha=self.scale)

    def with_outputs_scaled(self, factors: Tensor) -> "LoRABypass":
        """The bypass with outputs multiplied by factors [out]; differentiable. It must have no bias."""
        return replace(self, b=(self.b * factors[:, None]).to(self.b.dtype))

    def dropping(self, mask: Mask) -> "DroppingLoRA":
        return DroppingLoRA(self, mask)

    def merged(self, dense: Dense, side: Side) -> Dense:
        exact = exact_type(dense.weight.dtype)
        weight = dense.weight + self.scale * (self.b.to(exact) @ self.a.to(exact))
        if self.bias is None:
            return replace(dense, weight=weight)
        added = self.scale * self.bias.to(exact)
        return Dense(weight, added if dense.bias is None else dense.bias + added)


def is_lora(bypass: Bypass | None) -> TypeGuard[LoRABypass]:
    """Tells whether the bypass is a plain low-rank product of the linear's input, as batched LoRA needs."""
    return type(bypass) is LoRABypass and bypass.bias is None


def is_plain(bypass: Bypass | None) -> TypeGuard[LoRABypass]:
    """Tells whether that holds in training, too: gradients do not depend on the linear's output."""
    return is_lora(bypass) and not bypass.dropout


@dataclass(frozen=True, slots=True, eq=False)
class DroppingLoRA(Bypass):
    """A LoRA bypass in training with dropout."""

    bypass: LoRABypass
    mask: Mask

    def parameters(self) -> Mapping[str, Tensor]:
        return self.bypass.parameters()

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "DroppingLoRA":
        return replace(self, bypass=self.bypass.with_parameters(parameters))

    def add_(self, x: Tensor, y: Tensor) -> None:
        self.bypass.add_(self.mask(x), y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bypass.add(self.mask(x), y)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLoRA(Bypass):
    """a [rank, vocabulary], b [width, rank], beside an embedding that multiplies its rows by `factor`. x
    [rows] are token ids. There is no dropout, as in PEFT."""

    a: Tensor
    b: Tensor
    scale: float
    factor: float = 1.0

    def parameters(self) -> Mapping[str, Tensor]:
        return {"lora_embedding_A": self.a, "lora_embedding_B": self.b}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "EmbeddingLoRA":
        return replace(self, a=parameters["lora_embedding_A"], b=parameters["lora_embedding_B"])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y.addmm(F.embedding(x, self.a.t()), self.b.t(), alpha=self.scale * self.factor)

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.addmm_(F.embedding(x, self.a.t()), self.b.t(), alpha=self.scale * self.factor)

    def with_outputs_scaled(self, factors: Tensor) -> "EmbeddingLoRA":
        """The bypass with outputs multiplied by factors [width]; differentiable."""
        return replace(self, b=(self.b * factors[:, None]).to(self.b.dtype))

    def merged(self, dense: Dense, side: Side) -> Dense:
        exact = exact_type(dense.weight.dtype)
        return replace(dense, weight=dense.weight + self.scale * (self.b.to(exact) @ self.a.to(exact)).t())


LowRank = LoRABypass | EmbeddingLoRA
Scale = Callable[[str, int], float]  # of the bypass at a path, whose matrices have this rank


def take_linears(
    saved: Saved, frame: Frame, scale: Scale, dropout: float, with_bias: bool
) -> Iterator[tuple[Site, LoRABypass]]:
    """Takes a file's matrices beside linears. Raises AdapterMismatch."""
    endings = ["lora_A.weight", "lora_B.weight", *["lora_B.bias"] * with_bias]
    for path, (a, b, *rest) in saved.pairs(*endings).items():
        site = site_at(frame.sites, path, Kind.LINEAR)
        rank = _rank(a)
        expect_shape(site, "lora_A", a, max(rank, 1), site.inputs)
        expect_shape(site, "lora_B", b, site.outputs, rank)
        for bias in rest:
            expect_shape(site, "lora_B.bias", bias, site.outputs)
        expect_product(saved, path, a, b, factor := scale(path, rank))
        yield site, LoRABypass(a, b, factor, dropout, *rest)


def take_embeddings(saved: Saved, frame: Frame, scale: Scale) -> Iterator[tuple[Site, EmbeddingLoRA]]:
    """Takes a file's matrices beside the embedding. Raises AdapterMismatch."""
    for path, (a, b) in saved.pairs("lora_embedding_A", "lora_embedding_B").items():
        site = site_at(frame.sites, path, Kind.EMBEDDING)
        rank = _rank(a)
        expect_shape(site, "lora_embedding_A", a, max(rank, 1), site.inputs)
        expect_shape(site, "lora_embedding_B", b, site.outputs, rank)
        expect_product(saved, path, a, b, (factor := scale(path, rank)) * site.factor)
        yield site, EmbeddingLoRA(a, b, factor, site.factor)


def expect_product(saved: Saved, path: str, a: Tensor, b: Tensor, factor: float) -> None:
    """Raises AdapterError where factor · B, or an element of factor · B A, may overflow the base's type, for
    a [rank, in] and b [out, rank]. The bound is made of each rank's largest numbers."""
    if a.is_meta or not a.numel() or not b.numel():
        return
    of_a, of_b = (vector_norm(one, math.inf, dim).double() for one, dim in ((a, 1), (b, 0)))
    largest = abs(factor) * max(of_b.max().item(), (of_a @ of_b).item())
    if not saved.is_known and not largest <= saved.largest:
        raise AdapterError(
            f"{saved.folder}: the adapter changes weights of {path} by up to {largest:g} (its lora_A holds "
            f"numbers up to {of_a.max().item():g}, its lora_B up to {of_b.max().item():g}, and alpha makes "
            f"that {factor:g} times as much); the base computes with numbers up to {saved.largest:g}"
        )


def _rank(a: Tensor) -> int:
    """Rank of a matrix A; 0 for a tensor that is no matrix, whose shape is refused later."""
    return len(a) if a.ndim == 2 else 0
