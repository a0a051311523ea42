"""IA3: y + y ⊙ (l − 1), at what linears give or, in feed-forward networks, at what they are given.
Liu et al. 2022, 2205.05638.

Both are y ⊙ l, and computed so. Fresh vectors are ones and change nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Operator, Part, Place, Side
from coserve.adapters.method import Written, chosen, named
from coserve.adapters.saved import PREFIX, Saved, expect_shape, site_at
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError, AdapterMismatch

# What linears are called that give keys or values, alone or together with queries.
_KEYS_AND_VALUES: Final = frozenset({
    "k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "wk", "wv", "k", "v", "kv_b_proj",
    "c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class IA3Config:
    """Which linears are scaled.

    `targets` are names or path endings of linears, empty for all in the decoder layers. None stands for
    what the paper scales: keys, values, and the inner activations of feed-forward networks. Those of them
    that `feedforward` names are scaled at their inputs, others at their outputs; None for the linears that
    feed-forward networks end with.
    """

    targets: tuple[str, ...] | None = None
    feedforward: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("targets", "feedforward"):
            if isinstance(names := getattr(self, name), str):
                raise AdapterError(f"IA3 {name} are several names, not one: ({names!r},)")


@dataclass(frozen=True, slots=True, eq=False)
class IA3Bypass(Bypass):
    """scales [width], one for each feature of y."""

    operators, exact = (Operator.ELEMENTWISE,), True
    scales: Tensor

    def parameters(self) -> Mapping[str, Tensor]:
        return {"ia3_l": self.scales}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "IA3Bypass":
        return IA3Bypass(parameters["ia3_l"])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return (y * self.scales).to(y.dtype)

    def add_(self, x: Tensor, y: Tensor) -> None:
        y *= self.scales

    def merged(self, dense: Dense, side: Side) -> Dense:
        if side is Side.INPUT:
            return replace(dense, weight=dense.weight * self.scales)
        bias = None if dense.bias is None else dense.bias * self.scales
        return Dense(dense.weight * self.scales[:, None], bias)


class IA3:
    """Learned scales of activations."""

    name, peft_type, config = "ia3", "IA3", IA3Config
    aliases: Final = {"target_modules": "targets", "feedforward_modules": "feedforward"}

    def fresh(self, config: IA3Config, frame: Frame, generator: torch.Generator) -> Part:
        """Ones, as PEFT starts."""
        sites = _targets(config, frame)
        entered = _entered(config, frame, sites)
        bypasses: dict[Place, Bypass] = {}
        for path, site in sites.items():
            side = Side.INPUT if path in entered else Side.OUTPUT
            width = site.inputs if path in entered else site.outputs
            bypasses[Place(path, side)] = IA3Bypass(torch.ones(width))
        return Part(self.name, config, bypasses)

    def read(self, saved: Saved, frame: Frame) -> Part:
        """A vector's shape says on which side it stands: [width, 1] scales outputs, [1, width] inputs."""
        saved.ignore("feedforward_modules", "fan_in_fan_out", "init_ia3_weights")
        bypasses: dict[Place, Bypass] = {}
        for path, scales in saved.ending("ia3_l").items():
            site = site_at(frame.sites, path, Kind.LINEAR)
            if scales.ndim == 2 and len(scales) == 1:
                expect_shape(site, "ia3_l", scales, 1, site.inputs)
                place = Place(path, Side.INPUT)
            else:
                expect_shape(site, "ia3_l", scales, site.outputs, 1)
                place = Place(path)
            bypasses[place] = IA3Bypass(scales.flatten())
        return Part(self.name, IA3Config(), bypasses)

    def write(self, part: Part) -> Written:
        fields = {
            "target_modules": sorted(place.path for place in part.bypasses),
            "feedforward_modules": sorted(p.path for p in part.bypasses if p.side is Side.INPUT),
        }
        tensors = {
            f"{PREFIX}{place.path}.ia3_l": scales[None] if place.side is Side.INPUT else scales[:, None]
            for place, bypass in part.bypasses.items()
            for scales in bypass.parameters().values()
        }
        return Written(fields, tensors)


def _targets(config: IA3Config, frame: Frame) -> dict[str, Site]:
    if config.targets is not None:
        return chosen(frame, config.targets)
    found = {path: frame.sites[path] for path in (*_keys_and_values(frame), *_second_linears(frame))}
    if not found:
        raise AdapterMismatch("IA3 finds no linears of keys, values or feed-forward networks in this model")
    return found


def _entered(config: IA3Config, frame: Frame, sites: Collection[str]) -> Collection[str]:
    """The targets that are scaled at their inputs. Raises AdapterMismatch for a name that is none of them."""
    if config.feedforward is None:
        return set(sites).intersection(_second_linears(frame))
    for name in config.feedforward:
        if not any(named(path, (name,)) for path in sites):
            raise AdapterMismatch(f"IA3: {name!r} of the feed-forward linears is none of the targets")
    return {path for path in sites if named(path, config.feedforward)}


def _keys_and_values(frame: Frame) -> list[str]:
    """By name; in an attention whose linears have other names, all but the last, which mixes the heads."""
    found: list[str] = []
    for layer in range(frame.depth):
        linears = _linears(frame, layer, attending=True)
        known = [s.path for s in linears if s.path.rpartition(".")[2] in _KEYS_AND_VALUES]
        found += known or [s.path for s in linears[:-1]]
    return found


def _second_linears(frame: Frame) -> list[str]:
    """Those outside of the attention that come back to the hidden size, from another width where there is
    one that does."""
    found: list[str] = []
    for layer in range(frame.depth):
        back = [s for s in _linears(frame, layer, attending=False) if s.outputs == frame.hidden_size]
        found += [s.path for s in back if s.inputs != frame.hidden_size] or [s.path for s in back[-1:]]
    return found


def _linears(frame: Frame, layer: int, attending: bool) -> list[Site]:
    """A layer's linears within its attention, or outside of it."""
    own = [site for site in frame.sites.values() if site.stage == layer]
    attention = tuple(f"{site.path}." for site in own if site.kind is Kind.ATTENTION)
    return [s for s in own if s.kind is Kind.LINEAR and s.path.startswith(attention) == attending]


METHOD = IA3()
