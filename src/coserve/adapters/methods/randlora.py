"""RandLoRA: y + (alpha / rank) Σ Bₙ (λₙ ⊙ A ⊙ γₙ) x, a sum over as many random bases as make its rank full,
with learned λ and γ; A and B are random, and all linears share them. Albert et al. 2025, 2502.00987.

On the narrower side of a linear stands A: its inputs where it has no more of them than outputs.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from coserve.adapters.linears import (
    MODEL,
    AddingBypass,
    Frozen,
    LinearBypass,
    LinearConfig,
    LinearMethod,
    Shapes,
    Tensors,
    take_frozen,
    without_values,
    zeros,
)
from coserve.adapters.method import MOST_ALPHA, MOST_RANK
from coserve.adapters.saved import PREFIX, Saved
from coserve.adapters.sites import Site
from coserve.core.ranges import BELOW_ONE, MOST_COUNT
from coserve.core.setting import Range
from coserve.errors import AdapterMismatch

_A, _B = "randlora_A", "randlora_B"
_LAMBDA, _GAMMA = "randlora_lambda", "randlora_gamma"
_SPARSITY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RandLoRAConfig(LinearConfig):
    """Settings of RandLoRA. The random matrices come from the `seed`, dense, or of ones with either sign and
    zeros (`sparse`, `very_sparse`); files have them unless `save_projection` is false, which takes the same
    version of torch to load."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 32
    alpha: Annotated[float, Range(-MOST_ALPHA, MOST_ALPHA)] = 640.0
    dropout: Annotated[float, Range(0.0, BELOW_ONE)] = 0.0
    seed: Annotated[int, Range(-MOST_COUNT, MOST_COUNT)] = 0
    save_projection: bool = True
    sparse: bool = False
    very_sparse: bool = False


class RandLoRABypass(AddingBypass[RandLoRAConfig]):
    """`randlora_lambda` [rank, bases] and `randlora_gamma` [bases, narrow]; the frozen `randlora_A` [rank, 1,
    narrowest] and `randlora_B` [widest, most bases, rank], of which it has the first entries."""

    def product(self, x: Tensor) -> Tensor:
        of_lambda, gamma = self.tensors[_LAMBDA], self.tensors[_GAMMA]
        bases, narrow = gamma.shape
        wide = max(self.site.inputs, self.site.outputs)
        a = self.frozen.tensors[_A][:, :, :narrow] * of_lambda[:, :, None] * gamma
        b = self.frozen.tensors[_B][:wide, :bases]
        # PEFT's order, in which the bases of A come second and those of B first.
        down, up = a.flatten(0, 1), b.flatten(1)
        if self.site.inputs > self.site.outputs:
            down, up = up.t(), down.t()
        return F.linear(F.linear(x, down), up) * (self.settings.alpha / self.settings.rank)


class RandLoRA(LinearMethod[RandLoRAConfig]):
    """Sums of random bases."""

    name, peft_type, config, bypass = "randlora", "RANDLORA", RandLoRAConfig, RandLoRABypass
    aliases: Mapping[str, str] = {
        "r": "rank", "randlora_alpha": "alpha", "randlora_dropout": "dropout",
        "projection_prng_key": "seed", "target_modules": "targets",
    }  # fmt: skip
    transposed = True

    def shapes(self, settings: RandLoRAConfig, site: Site) -> Shapes:
        narrow = min(site.inputs, site.outputs)
        bases = math.ceil(narrow / settings.rank)
        return {_LAMBDA: (settings.rank, bases), _GAMMA: (bases, narrow)}

    def draw(self, settings: RandLoRAConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        gamma = shapes[_GAMMA]
        return {_LAMBDA: zeros(shapes[_LAMBDA]), _GAMMA: zeros(gamma) + 1 / max(gamma)}

    def frozen(self, config: RandLoRAConfig, sites: Collection[Site], saved: Saved | None) -> Frozen:
        outputs, inputs = max(site.outputs for site in sites), max(site.inputs for site in sites)
        narrow, wide = sorted((outputs, inputs))
        bases = math.ceil(narrow / config.rank)
        shapes: Shapes = {_A: (config.rank, 1, narrow), _B: (wide, bases, config.rank)}
        if saved is not None and config.save_projection:
            found = take_frozen(saved, shapes)
            for name in self.copied(config, sites) & {*saved.left}:
                copy, own = saved.tensor(name), found.tensors[name.rpartition(".")[2]]
                if copy.shape != own.shape or not (copy.is_meta or torch.equal(copy, own)):
                    raise AdapterMismatch(
                        f"{saved.folder}: {name} is no copy of the matrix that all linears share"
                    )
            return found
        if saved is not None and saved.device.type == "meta":
            return without_values(shapes)
        generator = Generator().manual_seed(config.seed)
        if config.sparse or config.very_sparse:
            sparsity = math.sqrt(narrow) if config.very_sparse else _SPARSITY
            return Frozen({name: _draw_sparse(shape, sparsity, generator) for name, shape in shapes.items()})
        a = _draw(shapes[_A], generator)
        b = torch.cat([_draw((wide, 1, config.rank), generator) for _ in range(bases)], dim=1)
        return Frozen({name: (each / each.std()).float() for name, each in ((_A, a), (_B, b))})

    def stored(self, config: RandLoRAConfig, sites: Collection[Site]) -> Iterable[str]:
        return [f"{MODEL}{name}" for name in (_A, _B)] if config.save_projection else ()

    def copied(self, config: RandLoRAConfig, sites: Collection[Site]) -> set[str]:
        """PEFT writes both matrices once more for each linear."""
        paths = [site.path for site in sites] if config.save_projection else []
        return {f"{PREFIX}{path}.{name}" for path in paths for name in (_A, _B)}

    def written_frozen(self, path: str, bypass: LinearBypass[RandLoRAConfig]) -> Tensors:
        own = bypass.frozen.tensors if bypass.settings.save_projection else {}
        return {f"{MODEL}{name}": tensor for name, tensor in own.items()}


def _draw(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """A base as PEFT draws it, in bfloat16: uniform within one over the root of its width."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)


def _draw_sparse(shape: tuple[int, ...], sparsity: float, generator: Generator) -> Tensor:
    """Ones of either sign, each in one of 2 · sparsity places, divided by their deviation."""
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32)
    share = 1 / (2 * sparsity)
    signs = (drawn > 1 - share).float() - (drawn < share).float()
    return signs / signs.std()


METHOD = RandLoRA()
