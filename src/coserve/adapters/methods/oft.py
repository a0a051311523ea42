"""OFT: W (R x), with a block-diagonal R that rotates the inputs. Qiu et al. 2023, 2306.07280; Qiu et al.
2025, 2506.19847.

R is the Cayley transform of skew-symmetric blocks Q, (I − Q)(I + Q)⁻¹, or the first terms of its Neumann
series.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

import torch
from torch import Generator, Tensor

from coserve.adapters.bypass import InTypes, Side
from coserve.adapters.linears import LinearConfig, LinearMethod, Shapes, TurningBypass, pieces, zeros
from coserve.adapters.method import MOST_RANK
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Site
from coserve.core.setting import Range
from coserve.errors import AdapterError

_WEIGHT: Final = "oft_R.weight"
_SINCE: Final = (0, 18)  # PEFT's version in which the Neumann series got its present terms
_MOST_TERMS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OFTConfig(LinearConfig):
    """Settings of OFT: the width of a block, or, where that is 0, the number of `blocks`; a number that does
    not divide a linear's inputs gives way to the nearest that does. With `block_share` all blocks are one."""

    blocks: Annotated[int, Range(0, MOST_RANK)] = 0
    block_size: Annotated[int, Range(0, MOST_RANK)] = 32
    block_share: bool = False
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: Annotated[int, Range(1, _MOST_TERMS)] = 5

    def width(self, inputs: int) -> int:
        """The width of a linear's blocks."""
        if self.block_size:
            return nearest_divisor(inputs, self.block_size)
        return inputs // nearest_divisor(inputs, self.blocks)


class OFTBypass(TurningBypass[OFTConfig]):
    """The upper triangles of skew-symmetric blocks, [blocks, width (width − 1) / 2], row by row."""

    side = Side.INPUT

    def change(self, y: Tensor) -> Tensor:
        return _apply(y, self._turns())

    def add_(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            y.add_(_apply(y, self._kept[y.dtype]))

    @property
    def made(self) -> int:
        width = self.settings.width(self.site.inputs)
        return len(self.tensors[_WEIGHT]) * width * width * self.dtype.itemsize

    @cached_property
    def _kept(self) -> InTypes:
        return InTypes(self._turns_in)

    def _turns_in(self, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return self._turns().to(dtype)

    def _turns(self) -> Tensor:
        """R − I, [blocks, width, width]."""
        upper = self.tensors[_WEIGHT]
        width = self.settings.width(self.site.inputs)
        rows, columns = torch.triu_indices(width, width, 1, device=upper.device)
        q = upper.new_zeros(len(upper), width, width)
        q = q.index_put((torch.arange(len(upper), device=upper.device)[:, None], rows, columns), upper)
        q = q - q.transpose(1, 2)
        if not self.settings.use_cayley_neumann:
            eye = torch.eye(width, dtype=q.dtype, device=q.device)
            solved: Tensor = torch.linalg.solve(eye + q, -2 * q, left=False)
            return solved
        terms = self.settings.num_cayley_neumann_terms
        if terms <= 2:
            return (terms - 1) * 2 * q
        power = q
        found = 2 * q
        last = max(3, terms - 1)
        for number in range(2, last + 1):
            power = power @ q
            found = found + (power if number == last else 2 * power)
        return found


class OFT(LinearMethod[OFTConfig]):
    """Rotated inputs."""

    name, peft_type, config, bypass = "oft", "OFT", OFTConfig, OFTBypass
    aliases: Mapping[str, str] = {"r": "blocks", "oft_block_size": "block_size", "target_modules": "targets"}
    ignored = ("init_weights", "eps")
    inits = (True, False)
    forgone = ("module_dropout",)

    def shapes(self, settings: OFTConfig, site: Site) -> Shapes:
        if (settings.blocks == 0) == (settings.block_size == 0):
            raise AdapterError(
                f"OFT has either blocks or block_size, and here are {settings.blocks} and "
                f"{settings.block_size}"
            )
        width = settings.width(site.inputs)
        count = 1 if settings.block_share else site.inputs // width
        return {_WEIGHT: (count, width * (width - 1) // 2)}

    def draw(self, settings: OFTConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}

    def read_config(self, saved: Saved, paths: Any) -> OFTConfig:
        saved.refuse("coft", "its rotations are bounded while they are applied (constrained OFT)")
        if "oft_block_size" not in saved.fields:
            raise AdapterError(
                f"{saved.folder}: oft_block_size is missing: PEFT before 0.14 had another OFT, and reads its "
                "files alone"
            )
        config = super().read_config(saved, paths)
        version = saved.fields.get("peft_version")
        if config.use_cayley_neumann and not _is_since(version):
            raise AdapterError(
                f"{saved.folder}: peft_version={shown(version)} has other terms of use_cayley_neumann than "
                "PEFT from 0.18 on, so that the adapter would answer otherwise: train it anew"
            )
        return config

    def written_fields(self, config: OFTConfig) -> dict[str, Any]:
        return {**super().written_fields(config), "peft_version": ".".join(map(str, (*_SINCE, 0)))}


def nearest_divisor(size: int, wanted: int) -> int:
    """The divisor of `size` that is nearest to `wanted`, the smaller one of two."""
    if wanted >= size:
        return size
    below = next(n for n in range(wanted, 0, -1) if size % n == 0)
    above = next(n for n in range(wanted, size + 1) if size % n == 0)
    return below if wanted - below <= above - wanted else above


def _apply(y: Tensor, turns: Tensor) -> Tensor:
    """y [rows, in] by blocks [blocks or 1, width, width]."""
    turned: Tensor = pieces(y, turns.shape[-1]).transpose(0, 1) @ turns.to(y.dtype)
    return turned.transpose(0, 1).flatten(1)


def _is_since(version: object) -> bool:
    """Tells whether PEFT of this version has the present terms."""
    numbers = version.split(".")[:2] if isinstance(version, str) else []
    return all(n.isdecimal() and len(n) < 5 for n in numbers) and tuple(map(int, numbers)) >= _SINCE


METHOD = OFT()
