"""MiSS: y + B s, where s [rank] is the sum of x's consecutive shards of rank features. Kang and Yin 2024,
2409.15371 (first Bone).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch.nn.functional as F
from torch import Generator, Tensor

from coserve.adapters.linears import AddingBypass, LinearConfig, LinearMethod, Shapes, pieces, zeros
from coserve.adapters.method import MOST_RANK
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Site
from coserve.core.ranges import BELOW_ONE
from coserve.core.setting import Range
from coserve.errors import AdapterError

_BLOCK: Final = "miss_block"


@dataclass(frozen=True, slots=True, kw_only=True)
class MiSSConfig(LinearConfig):
    """Settings of MiSS: the rank, and `mini_rank`, the outputs after which B repeats itself; 0 for none."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 64
    dropout: Annotated[float, Range(0.0, BELOW_ONE)] = 0.0
    mini_rank: Annotated[int, Range(0, 1 << 20)] = 0


class MiSSBypass(AddingBypass[MiSSConfig]):
    """`miss_block` [rank, out], or [rank, mini_rank]."""

    def product(self, x: Tensor) -> Tensor:
        block = self.tensors[_BLOCK]
        rank = len(block)
        shards = pieces(F.pad(x, (0, -x.shape[-1] % rank)), rank).sum(-2)
        return (shards @ block).repeat(1, self.site.outputs // block.shape[1])


class MiSS(LinearMethod[MiSSConfig]):
    """Sums of shards."""

    name, peft_type, config, bypass = "miss", "MISS", MiSSConfig, MiSSBypass
    aliases: Mapping[str, str] = {
        "r": "rank", "miss_dropout": "dropout", "mini_r": "mini_rank", "target_modules": "targets",
    }  # fmt: skip

    def shapes(self, settings: MiSSConfig, site: Site) -> Shapes:
        rank, mini = settings.rank, settings.mini_rank
        if rank > site.inputs or (mini and site.outputs % mini):
            raise AdapterError(
                f"MiSS of rank {rank} and mini_rank {mini} does not fit {site.path}, {site.inputs} -> "
                f"{site.outputs}"
            )
        return {_BLOCK: (rank, mini or site.outputs)}

    def draw(self, settings: MiSSConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}

    def read_config(self, saved: Saved, paths: Collection[str]) -> MiSSConfig:
        """PEFT's `init_weights` says how the adapter is applied, too; `mini_r` counts beside "mini" alone."""
        init = saved.fields.get("init_weights", True)
        if init == "bat" or (isinstance(init, str) and init != "mini"):
            raise AdapterError(
                f"{saved.folder}: init_weights={shown(init)} is not supported: BAT's change depends on the "
                "base's weights, and of strings only 'mini' is"
            )
        if init != "mini":
            saved.ignore("mini_r")
            return super().read_config(saved, paths)
        mini = saved.fields.get("mini_r", 1)
        if type(mini) is not int or mini < 1:
            raise AdapterError(f"{saved.folder}: mini_r={shown(mini)} must be a whole number of 1 and more")
        return super().read_config(saved, paths)

    def written_fields(self, config: MiSSConfig) -> dict[str, Any]:
        fields = super().written_fields(config)
        mini = fields.pop("mini_r")
        return {**fields, "init_weights": "mini", "mini_r": mini} if mini else fields


METHOD = MiSS()
