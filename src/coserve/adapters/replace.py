"""An adapter's own modules in place of the base's: PEFT's `modules_to_save`, for any method, and LN tuning.

For the adapter's rows the output of the base's module is not used, except that of a norm; a step need not
compute it for them (`Bypass.replaces`). A linear may be pruned: a surrogate's (`zoo/surrogates.py`) has fewer
outputs or inputs than the base's, which `kept_units` in the file's configuration names.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Dense, InTypes, Place, Side, exact_type
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown, site_at
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError, AdapterMismatch
from coserve.kernels.native import ops
from coserve.kernels.native.layer import OwnWeight, Use

KEPT: Final = "kept_units"  # the field of pruned modules: {path: {"outputs": [0, 3], "inputs": [...]}}
REPLACED = (Kind.LINEAR, Kind.NORM, Kind.EMBEDDING)
_Self = TypeVar("_Self", bound="Replacement")


@dataclass(frozen=True, eq=False)
class Replacement(Bypass):
    """A linear's weight [out, in] and optional bias [out]. Files have `transposed` weights as [in, out]."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool = False

    def parameters(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def with_parameters(self: _Self, parameters: Mapping[str, Tensor]) -> _Self:
        return replace(self, weight=parameters["weight"], bias=parameters.get("bias"))

    @property
    def replaces(self) -> bool:
        return True

    def instead(self, x: Tensor) -> Tensor:
        if ops.takes(x, self.weight) and ops.is_fast_unpacked(len(x), self.weight, self.bias):
            return ops.linear_unpacked(x, self.weight, self.bias)
        given: Tensor = F.linear(x, self.weight, self.bias)
        return given

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.instead(x)

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight | None:
        if self.weight.dtype is not dtype or not ops.reads(self.weight, self.bias):
            return None
        return OwnWeight(rows, Use.REPLACES, self.weight, self.bias)

    @property
    def saved(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters().values())

    def merged(self, dense: Dense, side: Side) -> Dense:
        exact = exact_type(self.weight.dtype)
        return Dense(self.weight.to(exact), None if self.bias is None else self.bias.to(exact))


@dataclass(frozen=True, eq=False)
class PrunedReplacement(Replacement):
    """A linear's weight [kept outputs, kept inputs] and bias in place of one with `width` outputs and
    `inputs` inputs. It reads the inputs at `columns` alone; outputs other than those at `rows` are zero, and
    a surrogate's last linear does not read them. Without indices all are kept."""

    width: int = 0
    inputs: int = 0
    rows: Tensor | None = None  # int64
    columns: Tensor | None = None

    def with_parameters(self: _Self, parameters: Mapping[str, Tensor]) -> _Self:
        made = super().with_parameters(parameters)
        assert isinstance(made, PrunedReplacement)
        device = made.weight.device  # where a copy on another device is indexed
        rows, columns = (None if at is None else at.to(device) for at in (made.rows, made.columns))
        return replace(made, rows=rows, columns=columns)

    def instead(self, x: Tensor) -> Tensor:
        y = super().instead(x if self.columns is None else x.index_select(-1, self.columns))
        if self.rows is None:
            return y
        return y.new_zeros(*y.shape[:-1], self.width).index_copy_(-1, self.rows, y)

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight | None:
        found = super().own_weight(rows, side, dtype)
        return None if found is None else found._replace(outputs=self.rows, inputs=self.columns)

    @property
    def saved(self) -> int:
        return (self.width * (self.inputs + (self.bias is not None))) * self.weight.itemsize

    def merged(self, dense: Dense, side: Side) -> Dense:
        small = super().merged(dense, side)
        weight, bias = small.weight, small.bias
        if self.columns is not None:
            weight = weight.new_zeros(len(weight), self.inputs).index_copy_(1, self.columns, weight)
        if self.rows is not None:
            weight = weight.new_zeros(self.width, self.inputs).index_copy_(0, self.rows, weight)
            bias = None if bias is None else bias.new_zeros(self.width).index_copy_(0, self.rows, bias)
        return Dense(weight, bias)


@dataclass(frozen=True, eq=False)
class EmbeddingReplacement(Replacement):
    """The weight [vocabulary, width] of an embedding that multiplies its rows by `factor`."""

    factor: float = 1.0

    def instead(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight) * self.factor


@dataclass(frozen=True, eq=False)
class NormReplacement(Replacement):
    """A norm's weight [width] and optional bias. The normalized features are recovered from the base's norm
    as (y − base.bias) / gain; its `gain` [width] has no zeros."""

    exact = True
    base: Dense | None = None
    gain: Tensor | None = None

    @property
    def replaces(self) -> bool:
        return False  # it is made of the base's output

    def own_weight(self, rows: slice, side: Side, dtype: torch.dtype) -> OwnWeight | None:
        assert self.base is not None
        has_bias = self.bias is not None or self.base.bias is not None
        return None if has_bias else OwnWeight(rows, Use.SCALES, self._kept_factors[dtype])

    @cached_property
    def _kept_factors(self) -> InTypes:
        return InTypes(self._factors)

    def _factors(self, dtype: torch.dtype) -> Tensor:
        """Factor of the base's output, biases aside: [width], differentiable."""
        assert self.base is not None and self.gain is not None
        return (1 + (self.weight.to(self.gain.dtype) - self.base.weight) / self.gain).to(dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.base is not None
        normed = y if self.base.bias is None else y - self.base.bias
        scaled = normed * self._factors(y.dtype)
        return scaled if self.bias is None else scaled + self.bias.to(y.dtype)


def fresh_replacements(names: Iterable[str], frame: Frame) -> dict[Place, Bypass]:
    """The base's own weights, float32 on the CPU, at every module whose path ends with one of the names, as
    PEFT reads them. Raises AdapterMismatch for an unknown name."""
    found: dict[Place, Bypass] = {}
    for name in names:
        sites = [site for path, site in frame.sites.items() if path.endswith(name) and site.kind in REPLACED]
        if not sites:
            raise AdapterMismatch(
                f"modules_to_save: no linear, norm or embedding of the model is called {shown(name)}"
            )
        found |= {Place(site.path): fresh_replacement(site, frame) for site in sites}
    return found


def fresh_replacement(site: Site, frame: Frame) -> "Replacement":
    """The base's own weights at a site, float32 on the CPU."""
    dense = frame.frozen.dense(site.path)
    bias = None if dense.bias is None else _trainable(dense.bias)
    return _replacement(frame, site, _trainable(dense.weight), bias)


def expect_exact(adapter: AdapterVersion) -> None:
    """Raises AdapterError for an adapter with pruned modules, on which nothing is trained."""
    if any(isinstance(bypass, PrunedReplacement) for _, bypass in adapter.placed()):
        raise AdapterError(
            f"{adapter.name} has a surrogate in place of a block of its model: nothing is trained on an "
            "approximation, or learns from one"
        )


def take_replacements(saved: Saved, frame: Frame, names: Iterable[str]) -> dict[Place, Bypass]:
    """Takes `modules_to_save`, whose tensors have these `names`. Raises AdapterMismatch for modules that
    cannot be replaced, or whose tensors do not fit the base."""
    saved.ignore("modules_to_save")
    tensors: dict[str, dict[str, Tensor]] = {}
    for full in names:
        path, _, kind = full.removeprefix(PREFIX).rpartition(".")
        tensors.setdefault(path, {})[kind] = saved.tensor(full)
    return {Place(path): read_replacement(saved, frame, path, path, given) for path, given in tensors.items()}


def read_replacement(
    saved: Saved, frame: Frame, path: str, module: str, given: Mapping[str, Tensor]
) -> "Replacement":
    """The replacement of the base's module at `path` by `given`, a weight and a bias as files have them;
    `module` is the file's name for it. Raises AdapterMismatch where one is missing or does not fit."""
    site = site_at(frame.sites, path, *REPLACED)
    rows, columns = _kept(saved, site)
    shape = _shape(site)
    if rows or columns:
        shape = len(rows) or site.outputs, len(columns) or site.inputs
    for kind in ("weight", *["bias"] * site.has_bias):
        if kind not in given:
            raise AdapterMismatch(f"{saved.folder}: {PREFIX}{module}.{kind} is missing")
    expect_shape(site, "weight", given["weight"], *shape)
    if "bias" in given:
        expect_shape(site, "bias", given["bias"], *[len(rows) or site.outputs] * site.has_bias)
    if rows or columns:
        at = (torch.tensor(each, device=given["weight"].device) if each else None for each in (rows, columns))
        return PrunedReplacement(given["weight"], given.get("bias"), False, site.outputs, site.inputs, *at)
    weight = given["weight"].t() if site.transposed else given["weight"]
    return _replacement(frame, site, weight, given.get("bias"))


def written_kept(bypasses: Mapping[Place, Bypass]) -> dict[str, dict[str, dict[str, list[int]]]]:
    """The fields of a file for pruned modules, none without them."""
    kept = {
        place.path: {
            side: at.tolist()
            for side, at in (("outputs", bypass.rows), ("inputs", bypass.columns))
            if at is not None
        }
        for place, bypass in bypasses.items()
        if isinstance(bypass, PrunedReplacement)
    }
    return {KEPT: kept} if kept else {}


def written_replacements(
    bypasses: Mapping[Place, Bypass], inside: str = ""
) -> tuple[list[str], dict[str, Tensor]]:
    """The paths of replaced modules, and tensors by their names in files, where the modules are `inside`
    those at the paths."""
    paths, tensors = [], {}
    for place, bypass in bypasses.items():
        if isinstance(bypass, Replacement):
            paths.append(place.path)
            for name, tensor in bypass.parameters().items():
                turned = tensor.t() if bypass.transposed and name == "weight" else tensor
                tensors[f"{PREFIX}{place.path}{inside}.{name}"] = turned
    return paths, tensors


def copies_of(frame: Frame) -> dict[str, str]:
    """Names in files of copies of the base's embeddings and head, with their paths."""
    return {
        f"{PREFIX}{path}{inside}.weight": path
        for path, site in frame.sites.items()
        if not 0 <= site.stage < frame.depth and site.kind in (Kind.LINEAR, Kind.EMBEDDING)
        for inside in ("", ".base_layer")
    }


def expect_copies(saved: Saved, frame: Frame) -> None:
    """Takes embeddings and heads that PEFT saves by itself along with their bypasses. Raises AdapterMismatch
    where one is not the base's own."""
    copies = copies_of(frame)
    for full in copies.keys() & set(saved.left):
        dtype, copy, path = saved.dtype_of(full), saved.tensor(full), copies[full]
        # Without values there is nothing to compare.
        if not copy.is_meta and not frame.frozen.is_own(path, copy, dtype):
            raise AdapterMismatch(
                f"{saved.folder}: tensor {full!r} {tuple(copy.shape)} would go unused: it is not the base's "
                "own, and modules_to_save does not name it"
            )


def _replacement(frame: Frame, site: Site, weight: Tensor, bias: Tensor | None) -> Replacement:
    if site.kind is Kind.EMBEDDING:
        return EmbeddingReplacement(weight, None, factor=site.factor)
    if site.kind is Kind.LINEAR:
        return Replacement(weight, bias, site.transposed)
    gain = frame.frozen.gain(site.path)
    if not bool(gain.all()):
        raise AdapterError(
            f"{site.path} multiplies features by zero, and cannot be replaced for some rows only"
        )
    return NormReplacement(weight, bias, base=frame.frozen.dense(site.path), gain=gain)


def _shape(site: Site) -> Sequence[int]:
    """Shape of a site's weight in files."""
    if site.kind is Kind.NORM:
        return (site.outputs,)
    is_turned = site.transposed or site.kind is Kind.EMBEDDING
    return (site.inputs, site.outputs) if is_turned else (site.outputs, site.inputs)


def _kept(saved: Saved, site: Site) -> tuple[list[int], list[int]]:
    """The outputs and the inputs that a pruned linear has of the base's at a site, in order; none where it
    has all of them. Raises AdapterError."""
    kept = saved.fields.get(KEPT) or {}
    own = kept.get(site.path, {}) if isinstance(kept, dict) else None
    if own == {}:
        return [], []
    if not isinstance(own, dict) or own.keys() - {"outputs", "inputs"}:
        raise AdapterError(
            f"{saved.folder}: {KEPT} must have outputs and inputs by module, not {shown(kept)}"
        )
    if site.kind is not Kind.LINEAR or site.transposed:
        raise AdapterError(f"{saved.folder}: {KEPT} names {site.path}, which cannot be pruned")
    found = []
    for side, count in (("outputs", site.outputs), ("inputs", site.inputs)):
        units = own.get(side, [])
        ordered = isinstance(units, list) and all(type(unit) is int for unit in units)
        if not ordered or units != sorted({*units}) or (units and not 0 <= units[0] <= units[-1] < count):
            raise AdapterError(
                f"{saved.folder}: the {side} in {KEPT} at {site.path} must be numbers from 0 to {count - 1} "
                f"in ascending order, not {shown(units)}"
            )
        found.append(units)
    return found[0], found[1]


def expect_kept(saved: Saved, paths: Collection[str]) -> None:
    """Takes the field of pruned modules, which are among those at `paths`. Raises AdapterMismatch."""
    kept = saved.take(KEPT, {})
    if strange := [path for path in kept if path not in paths]:
        raise AdapterMismatch(f"{saved.folder}: {KEPT} names {shown(strange[0])}, which has no tensors")


def _trainable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", exact_type(tensor.dtype), copy=True)
