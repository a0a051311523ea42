"""Recurrent mixers of which a rank has some heads: gated delta networks and Mamba 2.

A rank has the projections, channels of the convolution, decays and states of its own heads. A group of keys
(B and C of Mamba 2), which several heads read, is computed in parts where ranks share it: every rank gets all
of its numbers. A norm whose group goes over the heads of several ranks adds up their squares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.model.placement import Placement
from coserve.model.refusal import unsupported
from coserve.model.sharded.placement import ColumnShard
from coserve.parallel.ranks import ALONE, ONE_PIECE, Pieces, Ranks, part_of, piece_widths
from coserve.parallel.states import Change

_DELTA: Final = frozenset({"conv1d", "dt_bias", "A_log", "norm", "out_proj"})
# A gated delta network's projections; the second form has a key head's numbers side by side.
_DELTA_COLUMNS: Final = (
    frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
    frozenset({"in_proj_qkvz", "in_proj_ba"}),
)
_MAMBA: Final = _DELTA | {"in_proj", "D"}
_BY_HEADS: Final = ("dt_bias", "A_log", "D")
_BOTH: Final[Pieces] = (1, 1)  # B and C
_NEAR: Final = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-5}


@dataclass(frozen=True, slots=True)
class MixerCut:
    """The cut of a mixer: the pieces of its linears' outputs (`columns`, by name), those of the convolution's
    `channels`, and the attributes of its module that are widths of what a rank has. Several ranks share each
    of `shared` groups; there are none where a rank has whole ones. `norms` tells that the norm is one over
    all heads of a group, not over each head alone."""

    columns: Mapping[str, Pieces]
    channels: Pieces
    widths: Mapping[str, int]
    shared: int = 0
    norms: bool = False

    @staticmethod
    def of(name: str, path: str, module: Any, ranks: int) -> "MixerCut | None":
        """The cut of the module at `path` of a model of type `name`; None where it is no such mixer. Raises
        UnsupportedModel where the ranks do not divide it."""
        named = (*module.named_parameters(), *module.named_buffers())
        parts = {tensor.partition(".")[0] for tensor, _ in named}

        def divided(count: int, what: str) -> int:
            if count % ranks:
                part = f"the {count} {what} of {path} cannot be divided over {ranks} ranks"
                raise unsupported(name, part, "choose another number of ranks")
            return count // ranks

        if (columns := frozenset(parts - _DELTA)) in _DELTA_COLUMNS and parts > _DELTA:
            keys, values = module.key_dim, module.value_dim
            widths = {
                "num_k_heads": divided(module.num_k_heads, "heads of keys"),
                "num_v_heads": divided(module.num_v_heads, "heads of values"),
                "key_dim": keys // ranks,
                "value_dim": values // ranks,
                "conv_dim": module.conv_dim // ranks,
            }
            channels = keys, keys, values
            own = {one: channels if one == "in_proj_qkv" else ONE_PIECE for one in sorted(columns)}
            return MixerCut(own, channels, widths)
        if parts != _MAMBA:
            return None
        inner, groups, size = module.intermediate_size, module.n_groups, module.ssm_state_size
        widths = {"num_heads": divided(module.num_heads, "heads"), "intermediate_size": inner // ranks}
        if groups % ranks and ranks % groups:
            divided(groups, "groups of heads")
        is_shared = groups % ranks > 0
        if is_shared:
            divided(groups * size, "numbers of groups")
        widths["n_groups"] = own_groups = 1 if is_shared else groups // ranks
        widths["conv_dim"] = inner // ranks + 2 * own_groups * size
        channels = inner, groups * size, groups * size
        columns_of = {"in_proj": (inner, *channels, module.num_heads)}
        return MixerCut(columns_of, channels, widths, groups if is_shared else 0, True)

    @property
    def across(self) -> bool:
        """Tells whether its norm adds up numbers of several ranks."""
        return self.norms and self.shared > 0

    def cut(self, module: Any, ranks: Ranks) -> None:
        """Leaves of the loaded module what a rank has, but for the linears."""
        for name in _BY_HEADS:
            if hasattr(module, name):
                _put(module, name, part_of(getattr(module, name).data, 0, ranks))
        for name, own in module.conv1d.named_parameters(recurse=False):
            _put(module.conv1d, name, self._channels_of(own.data, ranks))
        if self.norms:
            _put(module.norm, "weight", part_of(module.norm.weight.data, 0, ranks))
        if self.across:
            module.norm.group_size = len(module.norm.weight)
        for name, width in self.widths.items():
            setattr(module, name, width)

    def _channels_of(self, whole: Tensor, ranks: Ranks) -> Tensor:
        if not self.shared:
            return part_of(whole, 0, ranks, self.channels)
        inner, *both = torch.split(whole, piece_widths(len(whole), self.channels))
        group = ranks.number * self.shared // ranks.count
        return torch.cat([part_of(inner, 0, ranks), *(one.chunk(self.shared)[group] for one in both)])

    def place(self, name: str, own: Placement, ranks: Ranks) -> ColumnShard:
        """The placement of a linear before the states, by its name, given that of the rank's part."""
        if not self.shared:
            return ColumnShard(own, ranks)
        return SharedColumnShard(own, ranks, self.columns[name], self.shared)

    def join_norm(self, model_type: str, path: str, module: Any, ranks: Ranks) -> None:
        """Has the norm of a group be that of all its ranks' heads. Raises UnsupportedModel for a norm that
        computes anything else."""
        if not self.across:
            return
        norm, near = module.norm, _NEAR[module.norm.weight.dtype]
        x, gate = torch.randn(2, 3, len(norm.weight), generator=torch.Generator().manual_seed(0)).to(
            norm.weight
        )
        want, found = norm(x, gate), NormOverRanks(norm, ALONE, 1)(x, gate)
        if float((found - want).float().norm()) > near * float(want.float().norm()):
            raise unsupported(model_type, f"{path}.norm, which is one over ranks, computes another norm")
        module.norm = NormOverRanks(norm, ranks, self.shared)


class SharedColumnShard(ColumnShard):
    """Some outputs in pieces, of which the two before the last one are groups that ranks share: each rank
    gets all numbers of its group."""

    def __init__(self, own: Placement, ranks: Ranks, pieces: Pieces, groups: int) -> None:
        super().__init__(own, ranks)
        self._pieces, self._groups = pieces, groups

    def complete(self, y: Tensor) -> Tensor:
        ranks = self._ranks
        gate, x, b, c, steps = torch.split(y, piece_widths(y.shape[-1], self._pieces), -1)
        both = ranks.changed(torch.cat((b, c), -1), Change.COMBINE, Change.REDUCE_PARTITION, _BOTH)
        group = ranks.number * self._groups // ranks.count
        own = (whole.chunk(self._groups, -1)[group] for whole in both.chunk(2, -1))
        return torch.cat((gate, x, *own, steps), -1)


class NormOverRanks(nn.Module):
    """The gated norm of a mixer, each of whose `groups` has the heads of several ranks. It has no attribute
    by which kernels of norms, which know one rank, would take it for theirs."""

    def __init__(self, norm: Any, ranks: Ranks, groups: int) -> None:
        super().__init__()
        self.weight = norm.weight
        self._ranks, self._groups, self._least = ranks, groups, norm.variance_epsilon
        self._width = len(norm.weight) * ranks.count // groups

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        """The rank's own columns of the norm."""
        exact = hidden.float() if gate is None else hidden.float() * F.silu(gate.float())
        group = self._ranks.number * self._groups // self._ranks.count
        squares = F.pad(exact.square().sum(-1, keepdim=True), (group, self._groups - 1 - group))
        both = self._ranks.changed(squares, Change.REDUCE, Change.REDUCE)
        normed = exact * torch.rsqrt(both[..., group : group + 1] / self._width + self._least)
        y: Tensor = self.weight * normed.to(hidden.dtype)
        return y


def _put(module: nn.Module, name: str, own: Tensor) -> None:
    """Replaces a parameter, whose whole is freed."""
    setattr(module, name, nn.Parameter(own.clone(), requires_grad=False))
