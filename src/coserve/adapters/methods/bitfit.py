"""BitFit: y + (b − b_base) at linears and norms, which is training their biases b. Ben Zaken et al. 2022,
2106.10199.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, InTypes, Part, Place, Side, exact_type
from coserve.adapters.method import Written, chosen
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown, site_at
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError, AdapterMismatch
from coserve.kernels.native.layer import OwnWeight, Use

Biases = Literal["auto", "existing", "all"]

_KINDS: Final = (Kind.LINEAR, Kind.NORM)


@dataclass(frozen=True, slots=True)
class BitFitConfig:
    """Settings of BitFit: the biases that train.

    `existing` trains all the base's own biases; `all` also adds new ones, zero at first, to linears and norms
    of the decoder layers that have none; `auto` is `existing`, or `all` in a base without biases. `targets`
    restricts both to linears and norms with these names or path endings; under `auto` targets without a bias
    get one.
    """

    biases: Biases = "auto"
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.biases not in get_args(Biases):
            raise AdapterError(f"BitFit's biases are {', '.join(get_args(Biases))}, not {shown(self.biases)}")
        if isinstance(self.targets, str):
            raise AdapterError(f"BitFit targets are several names, not one: ({shown(self.targets)},)")


@dataclass(frozen=True, eq=False)
class BitFitBypass(Bypass):
    """`bias` [width] replaces the base's bias, `base` [width] (None without one)."""

    exact = True
    bias: Tensor
    base: Tensor | None

    def parameters(self) -> Mapping[str, Tensor]:
        return {"bias": self.bias}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "BitFitBypass":
        return replace(self, bias=parameters["bias"])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self._change(y.dtype)

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.add_(self._change(y.dtype))

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight | None:
        return OwnWeight(rows, Use.ADDS, self._changes[dtype]) if side is Side.OUTPUT else None

    @cached_property
    def _changes(self) -> InTypes:
        return InTypes(self._change)

    def merged(self, dense: Dense, side: Side) -> Dense:
        change = self._change(dense.weight.dtype)
        return replace(dense, bias=change if dense.bias is None else dense.bias + change)

    def _change(self, dtype: torch.dtype) -> Tensor:
        change = self.bias if self.base is None else self.bias - self.base
        return change.to(dtype)


class BitFit:
    """Trained biases."""

    name, peft_type, config = "bitfit", "COSERVE_BITFIT", BitFitConfig
    aliases: Final = {"target_modules": "targets"}

    def fresh(self, config: BitFitConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Starts from copies of the base's biases, from zeros where it has none."""
        bypasses: dict[Place, Bypass] = {}
        for path, site in _sites(config, frame).items():
            base = frame.frozen.bias(path)
            if base is None:
                bias = torch.zeros(site.outputs, dtype=torch.float32)
            else:
                bias = base.detach().to("cpu", exact_type(base.dtype), copy=True)
            bypasses[Place(path)] = BitFitBypass(bias, base)
        return Part(self.name, config, bypasses)

    def read(self, saved: Saved, frame: Frame) -> Part:
        saved.paths("bias")
        bypasses: dict[Place, Bypass] = {}
        for path, bias in saved.ending("bias").items():
            site = site_at(frame.sites, path, *_KINDS)
            expect_shape(site, "bias", bias, site.outputs)
            bypasses[Place(path)] = BitFitBypass(bias, frame.frozen.bias(path))
        return Part(self.name, BitFitConfig(), bypasses)

    def write(self, part: Part) -> Written:
        fields = {"target_modules": sorted(place.path for place in part.bypasses)}
        tensors = {
            f"{PREFIX}{place.path}.bias": bias
            for place, bypass in part.bypasses.items()
            for bias in bypass.parameters().values()
        }
        return Written(fields, tensors)


def _sites(config: BitFitConfig, frame: Frame) -> dict[str, Site]:
    if config.targets:
        found = chosen(frame, config.targets, _KINDS)
        bare = [path for path, site in found.items() if not site.has_bias]
        if bare and config.biases == "existing":
            raise AdapterMismatch(f"BitFit is to train existing biases only, and {bare[0]} has none")
        return found
    existing = {p: site for p, site in frame.sites.items() if site.kind in _KINDS and site.has_bias}
    if config.biases == "existing" and not existing:
        raise AdapterMismatch("BitFit is to train existing biases only, and this model has none")
    if config.biases == "existing" or (existing and config.biases == "auto"):
        return existing
    everywhere = {**chosen(frame, (), _KINDS), **existing}
    return {path: site for path, site in frame.sites.items() if path in everywhere}


METHOD = BitFit()
