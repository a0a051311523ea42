"""Bottleneck adapters: y + up(activation(down(y))) at the outputs of a layer's sublayers, before any norm or
residual. Houlsby et al. 2019, 1902.00751; Pfeiffer et al. 2021, 2005.00247.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypass, Part, Place
from coserve.adapters.method import Written
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown, site_at
from coserve.adapters.sites import Frame, Kind
from coserve.errors import AdapterError, AdapterMismatch
from coserve.kernels.native.lora import BottleneckSegment

Layout = Literal["houlsby", "pfeiffer"]
Activation = Literal["relu", "gelu", "silu"]

_KINDS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "houlsby": (Kind.ATTENTION, Kind.FEED_FORWARD),
    "pfeiffer": (Kind.FEED_FORWARD,),
}
_FUNCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
MOST_WIDTH: Final = 65_536  # features
_DOWN, _UP = "bottleneck_down", "bottleneck_up"
_ENDINGS: Final = (f"{_DOWN}.weight", f"{_DOWN}.bias", f"{_UP}.weight", f"{_UP}.bias")


@dataclass(frozen=True, slots=True)
class BottleneckConfig:
    """Settings of bottlenecks: `width` features between the two linears. Houlsby's layout has one after the
    attention and one after the feed-forward network of every layer, Pfeiffer's the latter only."""

    width: int = 64
    layout: Layout = "houlsby"
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        if type(self.width) is not int or not 1 <= self.width <= MOST_WIDTH:
            raise AdapterError(
                f"a bottleneck needs a whole width of 1 to {MOST_WIDTH}, not {shown(self.width)}"
            )
        for name, known in (("layout", get_args(Layout)), ("activation", get_args(Activation))):
            if getattr(self, name) not in known:
                raise AdapterError(
                    f"a bottleneck's {name} is {' or '.join(known)}, not {shown(getattr(self, name))}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class BottleneckBypass(Bypass):
    """down [width, hidden] with its bias [width], up [hidden, width] with its bias [hidden]."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    activation: Activation

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(zip(_ENDINGS, (self.down, self.down_bias, self.up, self.up_bias), strict=True))

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "BottleneckBypass":
        down, down_bias, up, up_bias = (parameters[name] for name in _ENDINGS)
        return replace(self, down=down, down_bias=down_bias, up=up, up_bias=up_bias)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y + F.linear(self._inside(y), self.up, self.up_bias)

    def add_(self, x: Tensor, y: Tensor) -> None:
        """Adds the up projection to y in place, without a separate product."""
        y.addmm_(self._inside(y), self.up.t()).add_(self.up_bias)

    def segment(self, rows: slice) -> BottleneckSegment | None:
        if self.activation != "relu":
            return None
        return BottleneckSegment(
            rows.start, rows.stop, self.down, self.up, 1.0, a_bias=self.down_bias, b_bias=self.up_bias
        )

    def _inside(self, y: Tensor) -> Tensor:
        return _FUNCTIONS[self.activation](F.linear(y, self.down, self.down_bias))


class Bottleneck:
    """Small networks after sublayers."""

    name, peft_type, config = "bottleneck", "COSERVE_BOTTLENECK", BottleneckConfig
    aliases: Final[Mapping[str, str]] = {}

    def fresh(self, config: BottleneckConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Draws the down projection as torch draws a linear's weight (uniform within 1 / √hidden); the rest
        is zero.

        Raises AdapterMismatch for a model that has a layer without such a sublayer.
        """
        bypasses: dict[Place, Bypass] = {}
        for path, width in _sublayers(config.layout, frame).items():
            bound = 1 / math.sqrt(width)
            bypasses[Place(path)] = BottleneckBypass(
                torch.empty(config.width, width, dtype=torch.float32).uniform_(
                    -bound, bound, generator=generator
                ),
                torch.zeros(config.width, dtype=torch.float32),
                torch.zeros(width, config.width, dtype=torch.float32),
                torch.zeros(width, dtype=torch.float32),
                config.activation,
            )
        return Part(self.name, config, bypasses)

    def read(self, saved: Saved, frame: Frame) -> Part:
        config = BottleneckConfig(
            saved.take("width", 64), saved.take("layout", "houlsby"), saved.take("activation", "relu")
        )
        saved.paths(*_ENDINGS)
        bypasses: dict[Place, Bypass] = {}
        for path, tensors in saved.pairs(*_ENDINGS).items():
            site = site_at(frame.sites, path, Kind.ATTENTION, Kind.FEED_FORWARD)
            hidden, width = site.outputs, config.width
            shapes = ((width, hidden), (width,), (hidden, width), (hidden,))
            for name, tensor, shape in zip(_ENDINGS, tensors, shapes, strict=True):
                expect_shape(site, name, tensor, *shape)
            down, down_bias, up, up_bias = tensors
            bypasses[Place(path)] = BottleneckBypass(down, down_bias, up, up_bias, config.activation)
        return Part(self.name, config, bypasses)

    def write(self, part: Part) -> Written:
        config = part.config
        assert isinstance(config, BottleneckConfig)
        fields = {
            "width": config.width,
            "layout": config.layout,
            "activation": config.activation,
            "target_modules": sorted(place.path for place in part.bypasses),
        }
        tensors = {
            f"{PREFIX}{place.path}.{name}": tensor
            for place, bypass in part.bypasses.items()
            for name, tensor in bypass.parameters().items()
        }
        return Written(fields, tensors)


def _sublayers(layout: Layout, frame: Frame) -> dict[str, int]:
    """The widths of a layout's sublayers, by path."""
    found = {path: site for path, site in frame.sites.items() if site.kind in _KINDS[layout]}
    for kind in _KINDS[layout]:
        layers = {site.stage for site in found.values() if site.kind is kind}
        if missing := sorted(set(range(frame.depth)) - layers):
            raise AdapterMismatch(
                f"a bottleneck stands after each layer's {kind.value}, and in this model's layer "
                f"{missing[0]} that is no module of its own"
            )
    return {path: site.outputs for path, site in found.items()}


METHOD = Bottleneck()
