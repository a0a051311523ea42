"""SHiRA: y + S x, with a sparse S whose places are chosen beforehand. Bhardwaj et al. 2024, 2406.13175."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from coserve.adapters.linears import (
    AddingBypass,
    Frozen,
    LinearBypass,
    LinearConfig,
    LinearMethod,
    Shapes,
    Tensors,
    zeros,
)
from coserve.adapters.method import MOST_RANK
from coserve.adapters.saved import PREFIX, Saved
from coserve.adapters.sites import Site
from coserve.core.setting import Range
from coserve.errors import AdapterError

_WEIGHT, _INDICES = "shira_weight", "shira_indices"


@dataclass(frozen=True, slots=True, kw_only=True)
class SHiRAConfig(LinearConfig):
    """Settings of SHiRA: at each linear as many weights train as in a LoRA of this rank, rank · (in + out),
    in places that are drawn."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 32


class SHiRABypass(AddingBypass[SHiRAConfig]):
    """`shira_weight` [count], and the frozen `shira_indices` [2, count] of its rows and columns."""

    def product(self, x: Tensor) -> Tensor:
        weight = self.tensors[_WEIGHT]
        rows, columns = self.frozen.tensors[_INDICES].long()
        outputs, inputs = self.site.outputs, self.site.inputs
        if len(x) * len(weight) <= outputs * inputs:  # no more memory than the dense matrix
            return x.new_zeros(len(x), outputs).index_add(1, rows, x[:, columns] * weight)
        dense = weight.new_zeros(outputs, inputs).index_put((rows, columns), weight, accumulate=True)
        return F.linear(x, dense)


class SHiRA(LinearMethod[SHiRAConfig]):
    """Sparse changes of weights."""

    name, peft_type, config, bypass = "shira", "SHIRA", SHiRAConfig, SHiRABypass
    aliases: Mapping[str, str] = {"r": "rank", "target_modules": "targets"}
    ignored = ("init_weights", "mask_type", "random_seed")

    def shapes(self, settings: SHiRAConfig, site: Site) -> Shapes:
        count = settings.rank * (site.inputs + site.outputs)
        if count > site.inputs * site.outputs:
            raise AdapterError(
                f"SHiRA of rank {settings.rank} has more weights than {site.path}, {site.inputs} -> "
                f"{site.outputs}"
            )
        return {_WEIGHT: (count,)}

    def draw(self, settings: SHiRAConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}

    def frozen_at(
        self, settings: SHiRAConfig, site: Site, saved: Saved | None, generator: Generator | None
    ) -> Frozen:
        outputs, inputs = site.outputs, site.inputs
        count = settings.rank * (inputs + outputs)
        if saved is not None:
            return Frozen(
                {_INDICES: saved.indices(f"{PREFIX}{site.path}.{_INDICES}", (2, count), (outputs, inputs))}
            )
        places, _ = torch.randperm(outputs * inputs, generator=generator)[:count].sort()
        return Frozen({_INDICES: torch.stack([places // inputs, places % inputs]).int()})

    def stored(self, config: SHiRAConfig, sites: Collection[Site]) -> Iterable[str]:
        return [f"{PREFIX}{site.path}.{_INDICES}" for site in sites]

    def written_fields(self, config: SHiRAConfig) -> dict[str, Any]:
        """PEFT draws places before it reads those of the file, for which it needs a kind of mask."""
        return {**super().written_fields(config), "mask_type": "random"}

    def written_frozen(self, path: str, bypass: LinearBypass[SHiRAConfig]) -> Tensors:
        return {f"{PREFIX}{path}.{_INDICES}": bypass.frozen.tensors[_INDICES]}


METHOD = SHiRA()
