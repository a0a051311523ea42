"""VeRA: y + b ⊙ (B (d ⊙ (A x))), with learned vectors b and d and random matrices A and B that all linears
share. Kopiczko et al. 2024, 2310.11454.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

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
from coserve.adapters.method import MOST_RANK
from coserve.adapters.saved import Saved
from coserve.adapters.sites import Site
from coserve.core.ranges import BELOW_ONE, MOST_COUNT
from coserve.core.setting import Range

_A, _B = "vera_A", "vera_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class VeRAConfig(LinearConfig):
    """Settings of VeRA. The random matrices, of this `rank`, come from the `seed`; files have them unless
    `save_projection` is false, which takes the same version of torch to load. d begins at `d_initial`."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 256
    dropout: Annotated[float, Range(0.0, BELOW_ONE)] = 0.0
    seed: Annotated[int, Range(-MOST_COUNT, MOST_COUNT)] = 0
    save_projection: bool = True
    d_initial: Annotated[float, Range(-1e4, 1e4)] = 0.1


class VeRABypass(AddingBypass[VeRAConfig]):
    """`vera_lambda_b` [out] and `vera_lambda_d` [rank]; the frozen `vera_A` [rank, widest in] and `vera_B`
    [widest out, rank], of which it has the first columns and rows."""

    def product(self, x: Tensor) -> Tensor:
        a, b = self.frozen.tensors[_A], self.frozen.tensors[_B]
        inner = F.linear(x, a[:, : self.site.inputs]) * self.tensors["vera_lambda_d"]
        return F.linear(inner, b[: self.site.outputs]) * self.tensors["vera_lambda_b"]


class VeRA(LinearMethod[VeRAConfig]):
    """Vectors between random matrices."""

    name, peft_type, config, bypass = "vera", "VERA", VeRAConfig, VeRABypass
    aliases: Mapping[str, str] = {
        "r": "rank", "vera_dropout": "dropout", "projection_prng_key": "seed", "target_modules": "targets",
    }  # fmt: skip
    transposed = True
    ignored = ("init_weights",)

    def shapes(self, settings: VeRAConfig, site: Site) -> Shapes:
        return {"vera_lambda_b": (site.outputs,), "vera_lambda_d": (settings.rank,)}

    def draw(self, settings: VeRAConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        first = {"vera_lambda_b": 0.0, "vera_lambda_d": settings.d_initial}
        return {name: zeros(shape) + first[name] for name, shape in shapes.items()}

    def frozen(self, config: VeRAConfig, sites: Collection[Site], saved: Saved | None) -> Frozen:
        shapes: Shapes = {
            _A: (config.rank, max(site.inputs for site in sites)),
            _B: (max(site.outputs for site in sites), config.rank),
        }
        if saved is not None and config.save_projection:
            return take_frozen(saved, shapes)
        if saved is not None and saved.device.type == "meta":
            return without_values(shapes)
        generator = Generator().manual_seed(config.seed)
        return Frozen({name: _draw(shape, generator) for name, shape in shapes.items()})

    def stored(self, config: VeRAConfig, sites: Collection[Site]) -> Iterable[str]:
        return [f"{MODEL}{name}" for name in (_A, _B)] if config.save_projection else ()

    def written_frozen(self, path: str, bypass: LinearBypass[VeRAConfig]) -> Tensors:
        own = bypass.frozen.tensors if bypass.settings.save_projection else {}
        return {f"{MODEL}{name}": tensor for name, tensor in own.items()}


def _draw(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """A matrix as PEFT draws it: uniform within √(6 / width)."""
    bound = math.sqrt(6 / shape[-1])
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


METHOD = VeRA()
