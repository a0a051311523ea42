"""An adapter's two files while a method reads them: what is not taken is refused by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.sites import Kind, Site, Sites
from coserve.errors import AdapterError, AdapterMismatch

PREFIX: Final = "base_model.model."

# Fields of PEFT's that change nothing in what an adapter computes, whatever they say. Where bypasses stand is
# read from the tensors.
_INFORMATION: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "coserve_version", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "peft_type", "peft_version", "revision", "runtime_config",
    "target_modules", "task_type",
})  # fmt: skip
_EMPTY: Final[tuple[Any, ...]] = (None, False, {}, [], "")


@dataclass(slots=True)
class Saved:
    """Fields and tensors of the adapter in `folder`, as they are read.

    Tensors come out in `dtype` on `device`. Every error names the file's folder.
    """

    folder: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    rest: Callable[[], None] = lambda: None  # called after each tensor, by whoever must not take too much
    _fields: dict[str, Any] = field(init=False)
    _tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._fields, self._tensors = dict(self.fields), dict(self.tensors)

    def take(self, name: str, default: Any) -> Any:
        """A field's value, `default` where it is missing. It must be of the default's type; a whole number
        does for another one, and null for nothing."""
        value = self._fields.pop(name, default)
        kind = type(default)
        if value is None and not default:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise AdapterError(f"{self.folder}: {name} must be of type {kind.__name__}, not {value!r}")
        return value

    def ignore(self, *names: str) -> None:
        """Fields that change nothing once the adapter is trained."""
        for name in names:
            self._fields.pop(name, None)

    def refuse(self, name: str, why: str) -> None:
        """Raises AdapterError where the field is there and not empty."""
        value = self._fields.pop(name, None)
        if value not in _EMPTY:
            raise AdapterError(f"{self.folder}: {name}={value!r} is not supported: {why}")

    def ending(self, ending: str) -> dict[str, Tensor]:
        """The tensors whose names end so, by the path of the module before that; they count as taken."""
        found = {}
        for name in list(self._tensors):
            if name.startswith(PREFIX) and name.endswith("." + ending):
                path = name.removeprefix(PREFIX).removesuffix("." + ending)
                found[path] = self._moved(name)
        return found

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the tensors that nobody has taken yet."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name. Raises AdapterMismatch where there is none."""
        if name not in self._tensors:
            raise AdapterMismatch(f"{self.folder}: {name} is missing")
        return self._moved(name)

    def pairs(self, *endings: str) -> dict[str, tuple[Tensor, ...]]:
        """Tensors that belong together, by module; AdapterMismatch where one of them is missing."""
        columns = [self.ending(ending) for ending in endings]
        paths = dict.fromkeys(path for column in columns for path in column)
        for path in paths:
            for ending, column in zip(endings, columns, strict=True):
                if path not in column:
                    raise AdapterMismatch(f"{self.folder}: {PREFIX}{path}.{ending} is missing")
        return {path: tuple(column[path] for column in columns) for path in paths}

    def expect_targets(self, paths: Iterable[str]) -> None:
        """For files of our own, whose `target_modules` are paths: AdapterMismatch where there are no tensors
        for one of them."""
        if missing := sorted(set(map(str, self.take("target_modules", []))) - set(paths)):
            raise AdapterMismatch(f"{self.folder}: the tensors at {missing[0]!r} are missing")

    def finish(self) -> None:
        """Raises AdapterError for fields, AdapterMismatch for tensors that nobody took."""
        for name, value in self._fields.items():
            if name not in _INFORMATION and value not in _EMPTY:
                raise AdapterError(f"{self.folder}: {name}={value!r} is not supported")
        for name, tensor in self._tensors.items():
            raise AdapterMismatch(f"{self.folder}: tensor {name!r} {tuple(tensor.shape)} would go unused")

    def _moved(self, name: str) -> Tensor:
        tensor = self._tensors.pop(name)
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AdapterMismatch(f"{self.folder}: tensor {name!r} holds {kind}, not floating-point numbers")
        moved = tensor.to(device=self.device, dtype=self.dtype)
        self.rest()
        return moved


def site_at(sites: Sites, path: str, *kinds: Kind) -> Site:
    """The site a file's tensor stands at. Raises AdapterMismatch."""
    site = sites.get(path)
    if site is None or site.kind not in kinds:
        what = " or ".join(kind.value for kind in kinds)
        raise AdapterMismatch(f"the adapter stands beside {path!r}, but the base has no such {what}")
    return site


def expect_shape(site: Site, name: str, tensor: Tensor, *shape: int) -> None:
    """Raises AdapterMismatch where a tensor of the adapter does not fit the base."""
    found = tuple(tensor.shape)
    if found != shape:
        raise AdapterMismatch(
            f"{site.path}: the base's {site.kind.value} is {site.inputs} -> {site.outputs}, but the "
            f"adapter's {name} is {found}, not {shape}"
        )
