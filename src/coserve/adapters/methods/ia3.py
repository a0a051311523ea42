"""IA3: y + y ⊙ (l − 1), at the outputs of linears or, in feed-forward networks, their inputs. Liu et al.
2022, 2205.05638.

Computed in this form: in low precision l − 1 represents small changes exactly enough, l does not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, InTypes, Part, Place, Side
from coserve.adapters.method import Written, chosen, named
from coserve.adapters.patterns import peft_matches
from coserve.adapters.replace import fresh_replacements, take_replacements, written_replacements
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown, site_at
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError, AdapterMismatch
from coserve.kernels.native.layer import OwnWeight, Use

# Names of linears that give keys or values, alone or together with queries.
_KEYS_AND_VALUES: Final = frozenset({
    "k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "wk", "wv", "k", "v", "kv_b_proj",
    "c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class IA3Config:
    """Settings of IA3: the linears that are scaled.

    `targets` are names or path endings of linears, empty for all in the decoder layers. None is the paper's
    choice: keys, values, and the inner activations of feed-forward networks. Targets that `feedforward` names
    are scaled at their inputs, others at their outputs; its None is the last linear of each feed-forward
    network. `modules_to_save` are endings of paths of linears, norms and embeddings
    that train whole.
    """

    targets: tuple[str, ...] | None = None
    feedforward: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("targets", "feedforward", "modules_to_save"):
            if isinstance(names := getattr(self, name), str):
                raise AdapterError(f"IA3 {name} are several names, not one: ({shown(names)},)")


@dataclass(frozen=True, eq=False)
class IA3Bypass(Bypass):
    """Scales [width], one for each feature of y."""

    exact = True
    scales: Tensor

    def parameters(self) -> Mapping[str, Tensor]:
        return {"ia3_l": self.scales}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "IA3Bypass":
        return IA3Bypass(parameters["ia3_l"])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(y, y, self._change(y.dtype))

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.addcmul_(y, self._change(y.dtype))

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight:
        return OwnWeight(rows, Use.ENTERS if side is Side.INPUT else Use.CHANGES, self._changes[dtype])

    @cached_property
    def _changes(self) -> InTypes:
        return InTypes(self._change)

    def merged(self, dense: Dense, side: Side) -> Dense:
        if side is Side.INPUT:
            return replace(dense, weight=dense.weight * self.scales)
        bias = None if dense.bias is None else dense.bias * self.scales
        return Dense(dense.weight * self.scales[:, None], bias)

    def _change(self, dtype: torch.dtype) -> Tensor:
        return (self.scales - 1).to(dtype)


class IA3:
    """Learned scales of activations."""

    name, peft_type, config = "ia3", "IA3", IA3Config
    aliases: Final = {"target_modules": "targets", "feedforward_modules": "feedforward"}

    def fresh(self, config: IA3Config, frame: Frame, generator: torch.Generator) -> Part:
        """Starts from ones, as PEFT does."""
        replaced = fresh_replacements(config.modules_to_save, frame)
        sites = _targets(config, frame)
        entered = _entered(config, frame, sites)
        bypasses: dict[Place, Bypass] = dict(replaced)
        for path, site in sites.items():
            if Place(path) in replaced:
                continue
            side = Side.INPUT if path in entered else Side.OUTPUT
            width = site.inputs if path in entered else site.outputs
            bypasses[Place(path, side)] = IA3Bypass(torch.ones(width, dtype=torch.float32))
        return Part(self.name, config, bypasses)

    def read(self, saved: Saved, frame: Frame) -> Part:
        """Reads scales; `feedforward_modules` says which of them scale inputs, [1, width], and not outputs,
        [width, 1]."""
        saved.ignore("fan_in_fan_out", "init_ia3_weights")
        selection = select(saved, frame, (Kind.LINEAR,))
        entered = _read_entered(saved, [site.path for site in selection.targets])
        saved.expect([*(f"{PREFIX}{site.path}.ia3_l" for site in selection.targets), *selection.within])
        replaced = take_replacements(saved, frame, selection.within)
        bypasses: dict[Place, Bypass] = dict(replaced)
        for path, scales in saved.ending("ia3_l").items():
            site = site_at(frame.sites, path, Kind.LINEAR)
            if path in entered:
                expect_shape(site, "ia3_l", scales, 1, site.inputs)
                place = Place(path, Side.INPUT)
            else:
                expect_shape(site, "ia3_l", scales, site.outputs, 1)
                place = Place(path)
            bypasses[place] = IA3Bypass(scales.flatten())
        names = tuple(place.path for place in replaced)
        return Part(self.name, IA3Config(modules_to_save=names), bypasses)

    def write(self, part: Part) -> Written:
        replaced, tensors = written_replacements(part.bypasses)
        scaled = {p: b.scales for p, b in part.bypasses.items() if isinstance(b, IA3Bypass)}
        for place, scales in scaled.items():
            turned = scales[None] if place.side is Side.INPUT else scales[:, None]
            tensors[f"{PREFIX}{place.path}.ia3_l"] = turned
        fields = {
            "target_modules": sorted(place.path for place in scaled),
            "feedforward_modules": sorted(place.path for place in scaled if place.side is Side.INPUT),
            "modules_to_save": sorted(replaced) or None,
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
    """The targets that are scaled at their inputs. Raises AdapterMismatch for a name that is no target."""
    if config.feedforward is None:
        return set(sites).intersection(_second_linears(frame))
    for name in config.feedforward:
        if not any(named(path, (name,)) for path in sites):
            raise AdapterMismatch(f"IA3: {name!r} of the feed-forward linears is none of the targets")
    return {path for path in sites if named(path, config.feedforward)}


def _read_entered(saved: Saved, paths: Sequence[str]) -> Collection[str]:
    """The targets that a file's `feedforward_modules` names, as PEFT reads it: by how paths end, whatever is
    before. Raises AdapterError for values that PEFT refuses, too."""
    value, targets = saved.fields.get("feedforward_modules"), saved.fields.get("target_modules")
    saved.ignore("feedforward_modules")
    if isinstance(value, str):
        return peft_matches("feedforward_modules", value, paths)
    if value is None:
        raise AdapterError(
            f"{saved.folder}: feedforward_modules is missing: it lists the targets that are scaled at their "
            "inputs, [] for none"
        )
    names = saved.names("feedforward_modules")
    if isinstance(targets, list) and (other := sorted(set(names) - set(targets))):
        raise AdapterError(
            f"{saved.folder}: {shown(other[0])} of feedforward_modules is none of target_modules"
        )
    return {path for path in paths if path.endswith(tuple(names))}


def _keys_and_values(frame: Frame) -> list[str]:
    """Paths of key and value projections, by name; in an attention with other names all linears but the last,
    the output projection."""
    found: list[str] = []
    for layer in range(frame.depth):
        linears = _linears(frame, layer, attending=True)
        known = [s.path for s in linears if s.path.rpartition(".")[2] in _KEYS_AND_VALUES]
        found += known or [s.path for s in linears[:-1]]
    return found


def _second_linears(frame: Frame) -> list[str]:
    """Paths of the last linears of feed-forward networks: linears outside of the attention with hidden-size
    outputs and another input width, else the layer's last linear with hidden-size outputs."""
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
