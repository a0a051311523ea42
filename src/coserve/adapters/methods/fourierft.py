"""FourierFT: y + scaling · Re F⁻¹(S) x, a change of the weights of which a few Fourier coefficients S train. Gao
et al. 2024, 2405.03003.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

import torch
from torch import Generator, Tensor

from coserve.adapters.linears import AddingBypass, Frozen, LinearConfig, LinearMethod, Shapes, zeros
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

    varied: ClassVar[Mapping[str, str]] = {"n_frequency_pattern": "n_frequency"}

    n_frequency: Annotated[int, Range(1, MOST_FREQUENCIES)] = 1000
    scaling: Annotated[float, Range(-1e9, 1e9)] = 150.0
    seed: Annotated[int, Range(0, MOST_COUNT)] = 777
    n_frequency_pattern: Mapping[str, int] = field(default_factory=dict)


class FourierFTBypass(AddingBypass[FourierFTConfig]):
    """`fourierft_spectrum` [count]; the frozen `places` [2, count] are its rows and columns in S [out, in]."""

    exact = True  # torch transforms no bfloat16

    def product(self, x: Tensor) -> Tensor:
        """The transform of x, by S, and of what comes out of that: neither S nor the change is ever made."""
        rows, columns = self.frozen.tensors[_PLACES]
        spectrum = torch.fft.ifft(x)[:, columns] * self.tensors[_SPECTRUM]
        gathered = spectrum.new_zeros(len(x), self.site.outputs).index_add(1, rows, spectrum)
        return torch.fft.ifft(gathered).real * self.settings.scaling


class FourierFT(LinearMethod[FourierFTConfig]):
    """Fourier coefficients of a change."""

    name, peft_type, config, bypass = "fourierft", "FOURIERFT", FourierFTConfig, FourierFTBypass
    aliases: Final = {"random_loc_seed": "seed", "target_modules": "targets"}
    transposed = True

    def shapes(self, settings: FourierFTConfig, site: Site) -> Shapes:
        if settings.n_frequency > site.inputs * site.outputs:
            raise AdapterError(
                f"FourierFT has {settings.n_frequency} coefficients, and {site.path} {site.inputs * site.outputs} weights"
            )
        return {_SPECTRUM: (settings.n_frequency,)}

    def draw(self, settings: FourierFTConfig, shapes: Shapes, generator: Generator) -> dict[str, Tensor]:
        return {name: zeros(shape) for name, shape in shapes.items()}

    def frozen_at(
        self, settings: FourierFTConfig, site: Site, saved: Saved | None, generator: Generator | None
    ) -> Frozen:
        count = settings.n_frequency
        if saved is not None and saved.device.type == "meta":
            return Frozen({_PLACES: torch.empty(2, count, dtype=torch.int64, device="meta")})
        return _places(site.outputs, site.inputs, count, settings.seed)


# Drawing some takes seconds for the widest linears, of which a model has few shapes.
_KNOWN: Final[dict[tuple[int, ...], Frozen]] = {}
_MOST_KNOWN: Final = 32


def _places(outputs: int, inputs: int, count: int, seed: int) -> Frozen:
    """The places that PEFT draws, the same at all linears of one shape."""
    key = outputs, inputs, count, seed
    if (known := _KNOWN.get(key)) is not None:
        return known
    drawn = torch.randperm(outputs * inputs, generator=Generator().manual_seed(seed))[:count]
    found = Frozen({_PLACES: torch.stack([drawn // inputs, drawn % inputs])})
    if not is_fake(drawn):
        _KNOWN[key] = found
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)  # another thread may have been quicker
    return found


METHOD = FourierFT()
