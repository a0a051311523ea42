"""An adapter's two files while a method reads them; fields and tensors not taken are refused by name."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.sites import Kind, Site, Sites
from coserve.errors import AdapterError, AdapterMismatch

PREFIX: Final = "base_model.model."

# Fields of PEFT's that change nothing in what an adapter computes, whatever they say.
_INFORMATION: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "coserve_version", "inference_mode", "peft_type",
    "peft_version", "revision", "runtime_config", "task_type",
})  # fmt: skip
_EMPTY: Final[tuple[Any, ...]] = (None, False, {}, [], "")
_LARGEST: Final = 1 << 31  # of whole numbers: sizes and counts; those beyond 2**1024 are no floats
_PIECE: Final = 1 << 15  # numbers that are looked at together: few enough that torch uses one thread
_SHOWN: Final = 80  # characters of a value in an error
MOST_NAMES: Final = 10_000  # of modules in one field; coserve itself writes one for each linear
_LISTED: Final = 3  # tensors that an error names; it counts the others
# float8 has no comparisons on CPUs, and PEFT's files hold no scales for it.
TYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KNOWN_TYPES: Final = frozenset(TYPES.values())
_INDICES: Final = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32)  # types of indices


@dataclass(slots=True)
class Saved:
    """Fields and tensors of the adapter in `folder`, as they are read.

    Tensors are given in `dtype` on `device`, and refused if they have NaN or numbers beyond `largest`. Every
    error names the folder.
    """

    folder: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    largest: float  # number that a tensor may hold
    rest: Callable[[], None] = lambda: None  # called after each tensor, by whoever must not take too much
    is_known: bool = False  # numbers were looked at before, and are not again
    _fields: dict[str, Any] = field(init=False)
    _tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._fields, self._tensors = dict(self.fields), dict(self.tensors)

    def take(self, name: str, default: Any) -> Any:
        """A field's value, `default` where it is missing. It must be of the default's type; an integer counts
        as a float, and null as an empty default."""
        value = self._fields.pop(name, default)
        kind = type(default)
        if value is None and not default:
            return default
        if type(value) is int and abs(value) > _LARGEST:
            raise AdapterError(f"{self.folder}: {name}={shown(value)} is too large")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise AdapterError(f"{self.folder}: {name} must be of type {kind.__name__}, not {shown(value)}")
        return value

    def names(self, name: str) -> list[str]:
        """A field that is a list of names, empty where it is missing. The field does not count as taken."""
        value = self.fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise AdapterError(f"{self.folder}: {name} must be a list of names, not {shown(value)}")
        if len(value) > MOST_NAMES:
            raise AdapterError(f"{self.folder}: {name} has {len(value)} names; at most {MOST_NAMES} are read")
        return value

    def ignore(self, *names: str) -> None:
        """Takes fields that have no effect once the adapter is trained."""
        for name in names:
            self._fields.pop(name, None)

    def refuse(self, name: str, why: str) -> None:
        """Raises AdapterError where the field is set and not empty."""
        value = self._fields.pop(name, None)
        if value not in _EMPTY:
            raise AdapterError(f"{self.folder}: {name}={shown(value)} is not supported: {why}")

    def expect_no_biases(self, method: str) -> None:
        """Takes `bias`. Raises AdapterError where the file has biases of the base."""
        if (bias := self.take("bias", "none")) != "none":
            raise AdapterError(
                f"{self.folder}: bias={shown(bias)} is not supported: of {method} only 'none' (LoRA trains "
                "biases, too)"
            )

    def ending(self, ending: str) -> dict[str, Tensor]:
        """The tensors with names `path.ending`, by path; they count as taken."""
        found = {}
        for name in list(self._tensors):
            if name.startswith(PREFIX) and name.endswith("." + ending):
                path = name.removeprefix(PREFIX).removesuffix("." + ending)
                found[path] = self._moved(name)
        return found

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the tensors not taken yet."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """Takes the tensor of this name. Raises AdapterMismatch where it is missing."""
        if name not in self._tensors:
            raise AdapterMismatch(f"{self.folder}: {name} is missing")
        return self._moved(name)

    def indices(self, name: str, shape: tuple[int, ...], bounds: Sequence[int]) -> Tensor:
        """Takes whole numbers of this shape below a bound, or in each row below its own, in 32 bits. Raises
        AdapterMismatch for others."""
        given = self._tensors.pop(name, None)
        found_shape = None if given is None else tuple(given.shape)
        if given is None or found_shape != shape:
            raise AdapterMismatch(f"{self.folder}: {name} must be of shape {shape}, not {found_shape}")
        found = given.to(self.device, torch.int32, copy=True)
        if found.is_meta:
            return found
        highest = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        highest = highest[(..., *[None] * (len(shape) - 1))]
        # PEFT on Windows writes them as float32.
        is_whole = given.dtype in _INDICES and torch.equal(found.to(given.dtype), given.to(self.device))
        if not is_whole or not bool(((found >= 0) & (found < highest)).all()):
            raise AdapterMismatch(
                f"{self.folder}: {name} must have whole numbers below {' and '.join(map(str, bounds))}"
            )
        return found

    def dtype_of(self, name: str) -> torch.dtype:
        """The type that a tensor has in the file."""
        return self._tensors[name].dtype

    def pairs(self, *endings: str) -> dict[str, tuple[Tensor, ...]]:
        """Takes tensors that belong together, by module. Raises AdapterMismatch where one is missing."""
        columns = [self.ending(ending) for ending in endings]
        paths = dict.fromkeys(path for column in columns for path in column)
        for path in paths:
            for ending, column in zip(endings, columns, strict=True):
                if path not in column:
                    raise AdapterMismatch(f"{self.folder}: {PREFIX}{path}.{ending} is missing")
        return {path: tuple(column[path] for column in columns) for path in paths}

    def paths(self, *endings: str) -> list[str]:
        """Takes `target_modules` of coserve's own files, which are paths. Raises AdapterMismatch unless the
        file's tensors are those with these endings at these paths."""
        found = self.names("target_modules")
        self.ignore("target_modules")
        self.expect(f"{PREFIX}{path}.{ending}" for path in found for ending in endings)
        return found

    def expect(self, names: Iterable[str], allowed: Collection[str] = ()) -> None:
        """Raises AdapterMismatch unless the file's tensors are those that its configuration asks for;
        `allowed` ones may be there or not."""
        wanted = dict.fromkeys(names)
        if missing := [name for name in wanted if name not in self.tensors]:
            verb = "is" if len(missing) == 1 else "are"
            raise AdapterMismatch(
                f"{self.folder}: {_listed(missing)} {verb} missing, which the configuration asks for"
            )
        if unused := [name for name in self.tensors if name not in wanted and name not in allowed]:
            raise AdapterMismatch(
                f"{self.folder}: {_listed([self._described(name) for name in unused])} would go unused: the "
                "configuration does not ask for it"
            )

    def finish(self) -> None:
        """Raises AdapterError for fields, AdapterMismatch for tensors not taken."""
        for name, value in self._fields.items():
            if name not in _INFORMATION and value not in _EMPTY:
                raise AdapterError(f"{self.folder}: {name}={shown(value)} is not supported")
        if self._tensors:
            unused = _listed([self._described(name) for name in self._tensors])
            raise AdapterMismatch(f"{self.folder}: {unused} would go unused")

    def _described(self, name: str) -> str:
        return f"tensor {name!r} {tuple(self.tensors[name].shape)}"

    def _moved(self, name: str) -> Tensor:
        tensor = self._tensors.pop(name)
        if tensor.dtype not in _KNOWN_TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AdapterMismatch(
                f"{self.folder}: tensor {name!r} holds {kind}, not floating-point numbers of 16 bits or more"
            )
        if not self.is_known:
            expect_numbers(self.folder, name, tensor, self.largest)
        moved = tensor.to(device=self.device, dtype=self.dtype)
        self.rest()
        return moved


def expect_numbers(folder: str, name: str, tensor: Tensor, largest: float) -> None:
    """Raises AdapterError where a CPU tensor has NaN, infinities, or numbers beyond `largest`."""
    if tensor.is_meta or not tensor.numel():
        return
    for piece in torch.split(tensor.flatten(), _PIECE):
        low, high = torch.aminmax(piece)
        if not (-largest <= low.item() and high.item() <= largest):  # nothing holds for NaN
            found = low.item() if not -largest <= low.item() else high.item()
            raise AdapterError(
                f"{folder}: tensor {name!r} holds {found:g}; the base computes with numbers up to {largest:g}"
            )


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _LISTED
    return f"{', '.join(names[:_LISTED])}{f' and {more} more' if more > 0 else ''}"


def shown(value: object) -> str:
    """A file's value as shown in errors, shortened."""
    written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."


def site_at(sites: Sites, path: str, *kinds: Kind) -> Site:
    """The site of a file's tensor. Raises AdapterMismatch."""
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
