"""VB-LoRA: LoRA whose matrices are made of vectors of a bank that all linears share: each piece is the sum
of a few of them, with weights by softmax. Li et al. 2024, 2405.15179.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from coserve.adapters.bypass import Bypass, InTypes, Part, Place
from coserve.adapters.linears import MODEL, AddingBypass, LinearConfig, LinearMethod, Shapes, take_shaped
from coserve.adapters.lowrank import LoRABypass, expect_product
from coserve.adapters.method import MOST_RANK
from coserve.adapters.methods.lora import METHOD as LORA
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.replace import copies_of, expect_copies, take_replacements
from coserve.adapters.saved import PREFIX, Saved
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind, Site
from coserve.core.ranges import BELOW_ONE
from coserve.core.setting import Range
from coserve.errors import AdapterError

_A, _B, _BANK = "vblora_logits_A", "vblora_logits_B", "vblora_vector_bank"


@dataclass(frozen=True, slots=True, kw_only=True)
class VBLoRAConfig(LinearConfig):
    """Settings of VB-LoRA: the rank, the bank's vectors, their length, which divides the inputs and outputs
    of each linear, and how many of them make a piece. Logits and bank begin as PEFT draws them."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 4
    num_vectors: Annotated[int, Range(1, 1 << 20)] = 256
    vector_length: Annotated[int, Range(1, MOST_RANK)] = 256
    topk: Annotated[int, Range(1, 1024)] = 2
    dropout: Annotated[float, Range(0.0, BELOW_ONE)] = 0.0
    init_vector_bank_bound: Annotated[float, Range(0.0, 1e4)] = 0.02
    init_logits_std: Annotated[float, Range(0.0, 1e4)] = 0.1


class VBLoRABypass(AddingBypass[VBLoRAConfig]):
    """`vblora_logits_A` [rank, in / length, vectors], `vblora_logits_B` [out / length, rank, vectors], and
    the bank [vectors, length]."""

    exact = True  # rounded logits choose other vectors
    shared = frozenset({_BANK})

    def product(self, x: Tensor) -> Tensor:
        a, b = self._matrices()
        return F.linear(F.linear(x, a), b)

    def add_(self, x: Tensor, y: Tensor) -> None:
        if self.mask is not None:
            return super().add_(x, y)
        both = self._kept[y.dtype]
        inputs = self.site.inputs
        a, b = both[:, :inputs], both[:, inputs:]
        y.addmm_(x @ a.t(), b)

    @property
    def made(self) -> int:
        return self.settings.rank * (self.site.inputs + self.site.outputs) * self.dtype.itemsize

    @cached_property
    def _kept(self) -> InTypes:
        return InTypes(self._both)

    @torch.no_grad()
    def _both(self, dtype: torch.dtype) -> Tensor:
        """A and Bᵀ side by side, [rank, in + out]."""
        a, b = self._matrices()
        return torch.cat([a, b.t()], dim=1).to(dtype)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank]."""
        a, b = self._pieces(self.tensors[_A]), self._pieces(self.tensors[_B])
        return a.flatten(1), b.transpose(1, 2).flatten(0, 1)

    def _pieces(self, logits: Tensor) -> Tensor:
        """The vectors chosen by logits [..., vectors], each the sum of some of the bank's: [..., length]."""
        best, which = logits.topk(self.settings.topk, dim=-1)
        return (best.softmax(-1)[..., None] * self.tensors[_BANK][which]).sum(-2)


class VBLoRA(LinearMethod[VBLoRAConfig]):
    """Matrices out of a bank of vectors."""

    name, peft_type, config, bypass = "vblora", "VBLORA", VBLoRAConfig, VBLoRABypass
    aliases: Mapping[str, str] = {"r": "rank", "vblora_dropout": "dropout", "target_modules": "targets"}
    transposed = True
    ignored = ()

    def shapes(self, settings: VBLoRAConfig, site: Site) -> Shapes:
        length, vectors = settings.vector_length, settings.num_vectors
        if site.inputs % length or site.outputs % length:
            raise AdapterError(
                f"VB-LoRA's vectors of {length} do not divide {site.path}, {site.inputs} -> {site.outputs}: "
                "set vector_length"
            )
        if settings.topk > vectors:
            raise AdapterError(
                f"VB-LoRA's bank has {vectors} vectors, of which {settings.topk} are to be chosen"
            )
        rank = settings.rank
        return {_A: (rank, site.inputs // length, vectors), _B: (site.outputs // length, rank, vectors)}

    def shared_shapes(self, config: VBLoRAConfig) -> Shapes:
        return {_BANK: (config.num_vectors, config.vector_length)}

    def draw(self, settings: VBLoRAConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=torch.float32).normal_(
                0, settings.init_logits_std, generator=generator
            )
            for name, shape in shapes.items()
        }

    def draw_shared(self, config: VBLoRAConfig, generator: Generator) -> dict[str, Tensor]:
        bound = config.init_vector_bank_bound
        bank = torch.empty(self.shared_shapes(config)[_BANK], dtype=torch.float32)
        return {_BANK: bank.uniform_(-bound, bound, generator=generator)}

    def read(self, saved: Saved, frame: Frame) -> Part:
        """Reads logits; of a file that has the chosen vectors alone, which cannot train on, the LoRA adapter
        that they make."""
        is_chosen = saved.take("save_only_topk_weights", False)
        return self._read_chosen(saved, frame) if is_chosen else super().read(saved, frame)

    def _read_chosen(self, saved: Saved, frame: Frame) -> Part:
        selection = select(saved, frame, (Kind.LINEAR,), has_layers=True)
        sites = {site.path: site for site in selection.targets}
        saved.ignore("fan_in_fan_out")
        saved.expect_no_biases(self.name)
        config = self.read_config(saved, sites)
        names = [
            f"{PREFIX}{path}.{ending}" for path in sites for side in (_A, _B) for ending in _chosen(side)
        ]
        bank_name = f"{MODEL}{_BANK}"
        saved.expect([*names, bank_name, *selection.within], allowed=copies_of(frame))
        bank = take_shaped(saved, bank_name, *self.shared_shapes(config)[_BANK])
        bypasses: dict[Place, Bypass] = {}
        for path, site in sites.items():
            shapes = self.shapes(config, site)
            a, b = (
                _pieces_of(saved, f"{PREFIX}{path}.", side, shapes[side], config, bank) for side in (_A, _B)
            )
            a, b = a.flatten(1), b.transpose(1, 2).flatten(0, 1)
            expect_product(saved, path, a, b, 1.0)
            bypasses[Place(path)] = LoRABypass(a, b, 1.0, config.dropout)
        replaced = take_replacements(saved, frame, selection.within)
        expect_copies(saved, frame)
        of_lora = LoRAConfig(
            rank=config.rank,
            alpha=config.rank,
            dropout=config.dropout,
            modules_to_save=tuple(saved.names("modules_to_save")),
        )
        return Part(LORA.name, of_lora, {**bypasses, **replaced})


def _chosen(side: str) -> tuple[str, str]:
    """The endings of the tensors with the chosen vectors' numbers and weights."""
    return f"{side}_topk_indices", f"{side}_topk_weights"


def _pieces_of(
    saved: Saved, owner: str, side: str, shape: tuple[int, ...], config: VBLoRAConfig, bank: Tensor
) -> Tensor:
    """The sums of chosen vectors, [..., length]. The last weight is what the others leave of one."""
    numbers, weights = (owner + ending for ending in _chosen(side))
    which = saved.indices(numbers, (*shape[:-1], config.topk), (config.num_vectors,))
    first = take_shaped(saved, weights, *shape[:-1], config.topk - 1)
    every = torch.cat([first, 1 - first.sum(-1, keepdim=True)], dim=-1)
    found: Tensor = (every[..., None] * bank[which.long()]).sum(-2)
    return found


METHOD = VBLoRA()
