"""HRA: W H₁ … Hᵣ x, with Householder reflections H = I − 2 u uᵀ of the inputs. Yuan et al. 2024,
2405.17484.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import torch
from torch import Generator, Tensor

from coserve.adapters.bypass import Side
from coserve.adapters.linears import LinearConfig, LinearMethod, Shapes, TurningBypass, uniform
from coserve.adapters.method import MOST_RANK
from coserve.adapters.sites import Site
from coserve.core.setting import Range

_U: Final = "hra_u"


@dataclass(frozen=True, slots=True, kw_only=True)
class HRAConfig(LinearConfig):
    """Settings of HRA: the number of reflections, and whether their directions are made orthogonal (Gram and
    Schmidt). An even number begins as pairs that cancel out."""

    rank: Annotated[int, Range(1, MOST_RANK)] = 8
    apply_gs: bool = False


class HRABypass(TurningBypass[HRAConfig]):
    """`hra_u` [in, rank]: a direction a column, of any length."""

    side = Side.INPUT

    def change(self, y: Tensor) -> Tensor:
        """H₁ … Hᵣ is I − U M⁻¹ Uᵀ, with U's products above M's diagonal and halves on it (Schreiber and Van
        Loan 1989); y is a row here, so the transpose of that is meant."""
        u = self._directions()
        if self.settings.apply_gs:
            down, up = u, 2 * u.t()
        else:
            halves = torch.full((u.shape[1],), 0.5, dtype=u.dtype, device=u.device)
            lower = (u.t() @ u).tril(-1) + torch.diag(halves)
            down, up = u, torch.linalg.solve_triangular(lower, u.t(), upper=False)
        return -(y @ down.to(y.dtype)) @ up.to(y.dtype)

    def _directions(self) -> Tensor:
        """Of length one, [in, rank]."""
        u = self.tensors[_U]
        if not self.settings.apply_gs:
            lengths: Tensor = torch.linalg.vector_norm(u, dim=0)
            return u / lengths
        found: list[Tensor] = []
        for direction in u.unbind(1):
            for earlier in found:
                direction = direction - (earlier @ direction) * earlier
            found.append(direction / torch.linalg.vector_norm(direction))
        return torch.stack(found, dim=1)


class HRA(LinearMethod[HRAConfig]):
    """Reflected inputs."""

    name, peft_type, config, bypass = "hra", "HRA", HRAConfig, HRABypass
    aliases: Mapping[str, str] = {"r": "rank", "apply_GS": "apply_gs", "target_modules": "targets"}

    def shapes(self, settings: HRAConfig, site: Site) -> Shapes:
        return {_U: (site.inputs, settings.rank)}

    def draw(self, settings: HRAConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        rows, rank = shapes[_U]
        if rank % 2:
            return {_U: uniform((rows, rank), generator)}
        return {_U: uniform((rows, rank // 2), generator).repeat_interleave(2, dim=1)}


METHOD = HRA()
