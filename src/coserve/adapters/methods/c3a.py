"""C3A: y + C x / in, with C of circulant blocks, which a circular convolution multiplies. Chen et al. 2024,
2407.19342.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import torch
from torch import Generator, Tensor

from coserve.adapters.linears import AddingBypass, LinearConfig, LinearMethod, Shapes, Varies, pieces, zeros
from coserve.adapters.method import MOST_RANK
from coserve.adapters.sites import Site
from coserve.core.setting import Range
from coserve.errors import AdapterError

_KERNEL: Final = "c3a_kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class C3AConfig(LinearConfig):
    """Settings of C3A: the width of a block, which divides the inputs and outputs of each linear."""

    block_size: Annotated[int, Range(1, MOST_RANK)] = 256
    block_size_pattern: Annotated[Mapping[str, int], Varies("block_size")] = field(default_factory=dict)


class C3ABypass(AddingBypass[C3AConfig]):
    """`c3a_kernel` [out / width, in / width, width]: entry (i, j) of a block is number (j − i) mod width."""

    exact = True  # torch transforms no bfloat16

    def product(self, x: Tensor) -> Tensor:
        kernel = self.tensors[_KERNEL]
        width = kernel.shape[-1]
        blocks = torch.fft.rfft(pieces(x, width))
        product = torch.einsum("nif,oif->nof", blocks, torch.fft.rfft(kernel).conj())
        found: Tensor = torch.fft.irfft(product, n=width)
        return found.flatten(1) / self.site.inputs


class C3A(LinearMethod[C3AConfig]):
    """Circular convolutions."""

    name, peft_type, config, bypass = "c3a", "C3A", C3AConfig, C3ABypass
    aliases: Mapping[str, str] = {"target_modules": "targets"}
    inits = (True, False, "gaussian", "kaiming_uniform", "xavier_uniform")

    def shapes(self, settings: C3AConfig, site: Site) -> Shapes:
        width = settings.block_size
        if site.inputs % width or site.outputs % width:
            raise AdapterError(
                f"C3A blocks of {width} do not divide {site.path}, {site.inputs} -> {site.outputs}: set "
                "block_size, or block_size_pattern"
            )
        return {_KERNEL: (site.outputs // width, site.inputs // width, width)}

    def draw(self, settings: C3AConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}


METHOD = C3A()
