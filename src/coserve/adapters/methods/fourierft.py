"""FourierFT: y + scaling · Re F⁻¹(S) x, a change of the weights of which a few Fourier coefficients S train.
Gao et al. 2024, 2405.03003.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import torch
from torch import Generator, Tensor

from coserve.adapters.linears import AddingBypass, Frozen, LinearConfig, LinearMethod, Shapes, Varies, zeros
from coserve.adapters.saved import Saved
from coserve.adapters.sites import Site
from coserve.core.ranges import MOST_COUNT
from coserve.core.setting import Range
from coserve.errors import AdapterError
from coserve.memory.fake_tensors import is_fake

_SPECTRUM, _PLACES = "fourierft_spectrum", "places"
MOST_FREQUENCIES: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FourierFTConfig(LinearConfig):
    """Settings of FourierFT: the number of coefficients at each linear, at places that the `seed` draws, and
    what their transform is multiplied by."""

    n_frequency: Annotated[int, Range(1, MOST_FREQUENCIES)] = 1000
    scaling: Annotated[float, Range(-1e9, 1e9)] = 150.0
    seed: Annotated[int, Range(-MOST_COUNT, MOST_COUNT)] = 777
    n_frequency_pattern: Annotated[Mapping[str, int], Varies("n_frequency")] = field(default_factory=dict)


class FourierFTBypass(AddingBypass[FourierFTConfig]):
    """`fourierft_spectrum` [count]; the frozen `places` [2, count] are its rows and columns in S [out,
    in]."""

    exact = True  # torch transforms no bfloat16

    def product(self, x: Tensor) -> Tensor:
        """The transform of x, by S, and of what comes out of that: neither S nor the change is ever made."""
        rows, columns = self.frozen.tensors[_PLACES]
        spectrum = torch.fft.ifft(x)[:, columns] * self.tensors[_SPECTRUM]
        gathered = spectrum.new_zeros(len(x), self.site.outputs).index_add(1, rows, spectrum)
        product: Tensor = torch.fft.ifft(gathered).real
        return product * self.settings.scaling


class FourierFT(LinearMethod[FourierFTConfig]):
    """Fourier coefficients of a change."""

    name, peft_type, config, bypass = "fourierft", "FOURIERFT", FourierFTConfig, FourierFTBypass
    aliases: Mapping[str, str] = {"random_loc_seed": "seed", "target_modules": "targets"}
    transposed = True

    def shapes(self, settings: FourierFTConfig, site: Site) -> Shapes:
        if settings.n_frequency > site.inputs * site.outputs:
            raise AdapterError(
                f"FourierFT has {settings.n_frequency} coefficients, and {site.path} has "
                f"{site.inputs * site.outputs} weights"
            )
        return {_SPECTRUM: (settings.n_frequency,)}

    def draw(self, settings: FourierFTConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}

    def frozen_at(
        self, settings: FourierFTConfig, site: Site, saved: Saved | None, generator: Generator | None
    ) -> Frozen:
        has_values = saved is None or saved.device.type != "meta"
        return _places(site.outputs, site.inputs, settings.n_frequency, settings.seed, has_values)


# Drawing some takes seconds for the widest linears, of which a model has few shapes.
_KNOWN: Final[dict[tuple[int, ...], Frozen]] = {}
_MOST_KNOWN: Final = 64


def _places(outputs: int, inputs: int, count: int, seed: int, has_values: bool) -> Frozen:
    """The places that PEFT draws, the same at all linears of one shape."""
    key = outputs, inputs, count, seed, has_values
    if (known := _KNOWN.get(key)) is not None:
        return known
    if has_values:
        drawn = torch.randperm(outputs * inputs, generator=Generator().manual_seed(seed))[:count]
    else:
        drawn = torch.empty(count, dtype=torch.int64, device="meta")
    found = Frozen({_PLACES: torch.stack([drawn // inputs, drawn % inputs])})
    if not is_fake(drawn) and drawn.is_meta != has_values:  # not those of a plan, which has no values at all
        _KNOWN[key] = found
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)  # another thread may have been quicker
    return found


METHOD = FourierFT()
