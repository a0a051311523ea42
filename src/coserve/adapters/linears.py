"""Methods beside linears share their settings, bypasses made of named tensors, and files.

A method's own file says which tensors stand beside a linear and what its rows become. How modules are chosen,
tensors read, refused and written is here, once for all of them.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Part, Place, Side, exact_type
from coserve.adapters.method import Written, chosen
from coserve.adapters.patterns import check_patterns, first_entries, peft_entries
from coserve.adapters.replace import (
    copies_of,
    expect_copies,
    fresh_replacements,
    take_replacements,
    written_replacements,
)
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind, Site
from coserve.core.ranges import check_range
from coserve.core.setting import Range, noted
from coserve.errors import AdapterError, AdapterMismatch
from coserve.kernels.dropout import Mask
from coserve.memory.fake_tensors import fake_tensors

MODEL: Final = "base_model."  # how the names of tensors begin that belong to no module
_PIECE: Final = 1024  # inputs of a linear that are merged at once
_SELECTED: Final = ("targets", "modules_to_save")
_NAMES: Final = "several names, not one"

Tensors = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
C = TypeVar("C", bound="LinearConfig")
_Self = TypeVar("_Self", bound="LinearBypass[Any]")


@dataclass(frozen=True, slots=True)
class Varies:
    """The note of a field with patterns: of the setting that they change."""

    setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Settings of a method beside linears.

    `targets` are names or path endings of linears, empty for all in the decoder layers; `modules_to_save` are
    endings of paths of linears, norms and embeddings that train whole. Defaults are PEFT's. A setting with
    the note `Range` is checked against it, and one that is `Literal` against its values. One with the note
    `Varies` has patterns of paths, at which another setting differs.
    """

    targets: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        method = kind.__name__.removesuffix("Config")
        for name in _SELECTED:
            if isinstance(names := getattr(self, name), str):
                raise AdapterError(f"{method} {name} are {_NAMES}: ({shown(names)},)")
        numbers = {one.name: type(one.default) for one in dataclasses.fields(self)}
        for name, bounds in noted(kind, Range).items():
            value, number = getattr(self, name), numbers[name]
            check_range(f"{method} {name}", value, bounds.least, bounds.most, number, AdapterError)  # type: ignore[arg-type]
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                values = ", ".join(map(str, get_args(hint)))
                raise AdapterError(f"{method} {name} is one of {values}, not {shown(getattr(self, name))}")
        for patterns in _varied(type(self)):
            check_patterns(patterns, getattr(self, patterns))

    def at(self: C, paths: Iterable[str]) -> dict[str, C]:
        """The settings at each of these linears. Raises AdapterError for patterns that take too long, or give
        a setting that is out of its range."""
        paths = tuple(paths)
        varied = _varied(type(self))
        none: dict[str, Any] = {patterns: {} for patterns in varied}
        plain = replace(self, **none)
        found = {patterns: first_entries(patterns, getattr(self, patterns), paths) for patterns in varied}
        changes = {
            path: {varied[name].setting: own[path] for name, own in found.items() if path in own}
            for path in paths
        }
        return {path: replace(plain, **own) if own else plain for path, own in changes.items()}


class Frozen:
    """Tensors of an adapter that never train, by name; several bypasses may have the same ones.

    `like` makes them in another type or on another device once for all of these.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._made: WeakValueDictionary[tuple[torch.dtype, torch.device], Frozen] = WeakValueDictionary()

    def like(self, trained: Tensor) -> "Frozen":
        """The tensors on the device of a trained one, and in its type unless they are whole numbers."""
        key = trained.dtype, trained.device
        if (known := self._made.get(key)) is not None:
            return known
        made = {
            name: tensor.to(key[1], key[0] if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.tensors.items()
        }
        if all(made[name] is tensor for name, tensor in self.tensors.items()):
            return self
        self._made[key] = found = Frozen(made)
        return found


_NONE: Final = Frozen({})
# Peaks by what they depend on: a model's linears have few shapes.
_REPLAYED: Final[dict[tuple[object, ...], int]] = {}
_MOST_PEAKS: Final = 1024


@dataclass(frozen=True, eq=False)
class LinearBypass(Bypass, Generic[C]):
    """Trained `tensors` and `frozen` ones beside the linear of `site`, with the method's `settings` there."""

    tensors: Tensors
    site: Site
    settings: C
    frozen: Frozen = _NONE
    dropout: float = 0.0
    note: str = ""
    mask: Mask | None = None
    side: ClassVar[Side] = Side.OUTPUT
    reads_input: ClassVar[bool] = True  # f is one of x; else of y

    @abstractmethod
    def given(self, rows: Tensor) -> Tensor:
        """f alone, of x [rows, in] or y [rows, width]; differentiable."""

    def parameters(self) -> Tensors:
        return self.tensors

    def with_parameters(self: _Self, parameters: Tensors) -> _Self:
        own = {name: parameters[name] for name in self.tensors}
        return replace(self, tensors=own, frozen=self.frozen.like(next(iter(own.values()))))

    @property
    def fixed(self) -> Collection[Tensor]:
        return self.frozen.tensors.values()

    @property
    def dtype(self) -> torch.dtype:
        """The type of its trained tensors."""
        return next(iter(self.tensors.values())).dtype

    def dropping(self: _Self, mask: Mask) -> _Self:
        return replace(self, mask=mask)

    def replayed(self, rows: int, dtype: torch.dtype) -> int:
        """The peak of the program itself, on tensors without data."""
        key = type(self), repr(self.settings), self.site.inputs, self.site.outputs, rows, dtype
        if key not in _REPLAYED:
            _REPLAYED[key] = self._peak(rows, dtype)
            while len(_REPLAYED) > _MOST_PEAKS:
                _REPLAYED.pop(next(iter(_REPLAYED)), None)  # another thread may have been quicker
        return _REPLAYED[key]

    def _peak(self, rows: int, dtype: torch.dtype) -> int:
        own = exact_type(dtype) if self.exact else dtype
        with fake_tensors() as counted:
            tensors = {n: torch.empty(t.shape, dtype=own).requires_grad_() for n, t in self.tensors.items()}
            frozen = {
                name: torch.empty(t.shape, dtype=own if t.is_floating_point() else t.dtype)
                for name, t in self.frozen.tensors.items()
            }
            x = torch.empty(rows, self.site.inputs, dtype=dtype).requires_grad_()
            y = torch.empty(rows, self.site.outputs, dtype=dtype).requires_grad_()
            if self.side is Side.INPUT:
                y = x
            one = replace(self, tensors=tensors, frozen=Frozen(frozen), mask=None)
            before = counted.live
            counted.reset()
            given = one.add(x, y)
            asked = [x, y, *tensors.values()]
            torch.autograd.grad(given, asked, torch.empty_like(given), allow_unused=True)
            return counted.peak - before


class AddingBypass(LinearBypass[C]):
    """y + f(x), with f linear."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """f(x) [rows, out] for x [rows, in] in the type of the tensors; differentiable."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.given(x).to(y.dtype)

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.add_(self.given(x).to(y.dtype))

    def merged(self, dense: Dense, side: Side) -> Dense:
        change = self.in_type(dense.weight.dtype).product
        columns = [change(rows).t() for rows in _unit_rows(dense.weight)]
        return replace(dense, weight=dense.weight + torch.cat(columns, dim=1))

    def given(self, rows: Tensor) -> Tensor:
        return self.product((rows if self.mask is None else self.mask(rows)).to(self.dtype))


class TurningBypass(LinearBypass[C]):
    """y + f(y), with f linear, where y is the linear's input or its output. f is given alone, as next to one
    bfloat16 knows steps of 1/128 only."""

    exact = True
    reads_input = False

    @abstractmethod
    def change(self, y: Tensor) -> Tensor:
        """f(y) for y [rows, width]; differentiable."""

    def given(self, rows: Tensor) -> Tensor:
        return self.change(rows)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.change(y)

    def add_(self, x: Tensor, y: Tensor) -> None:
        y.add_(self.change(y))

    def merged(self, dense: Dense, side: Side) -> Dense:
        one = self.in_type(dense.weight.dtype)
        if side is Side.OUTPUT:
            bias = None if dense.bias is None else one.add(dense.bias[None], dense.bias[None])[0]
            return Dense(one.add(dense.weight.t(), dense.weight.t()).t(), bias)
        columns = [dense.weight @ one.add(rows, rows).t() for rows in _unit_rows(dense.weight)]
        return replace(dense, weight=torch.cat(columns, dim=1))


def _unit_rows(weight: Tensor) -> Iterable[Tensor]:
    """The rows of the identity [in, in] for a weight [out, in], some at a time."""
    inputs = weight.shape[1]
    for start in range(0, inputs, _PIECE):
        rows = weight.new_zeros(min(_PIECE, inputs - start), inputs)
        rows.diagonal(start).fill_(1)
        yield rows


class LinearMethod(Generic[C]):
    """A method with one bypass at each of its linears: a `Method`.

    `ignored` are fields of a file that say how the adapter was drawn, `inits` the values of `init_weights`
    where PEFT refuses others, `forgone` fields of dropouts that coserve has not, which matter to training
    alone. With `transposed` PEFT has the method beside GPT-2's linears, too.
    """

    name: str
    peft_type: str
    config: type[C]
    bypass: type[LinearBypass[C]]
    aliases: Mapping[str, str]
    transposed: bool = False
    ignored: Collection[str] = ("init_weights",)
    inits: Collection[object] = ()
    forgone: Collection[str] = ()

    @abstractmethod
    def shapes(self, settings: C, site: Site) -> Shapes:
        """Shapes of the tensors beside a linear by the endings of their names in files. Raises AdapterError
        for settings that do not fit it."""

    @abstractmethod
    def draw(self, settings: C, shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
        """The first values of these tensors."""

    def draw_shared(self, config: C, generator: torch.Generator) -> dict[str, Tensor]:
        """The first values of tensors that train and that all bypasses have together."""
        return {}

    def shared_shapes(self, config: C) -> Shapes:
        """Shapes of the tensors that all bypasses have together, those that train."""
        return {}

    def frozen(self, config: C, sites: Collection[Site], saved: Saved | None) -> Frozen:
        """Tensors that never train and that all bypasses have together, from a file or drawn."""
        return _NONE

    def frozen_at(
        self, settings: C, site: Site, saved: Saved | None, generator: torch.Generator | None
    ) -> Frozen | None:
        """Tensors that never train of one bypass, from a file or drawn; None where it has those of all."""
        return None

    def stored(self, config: C, sites: Collection[Site]) -> Iterable[str]:
        """Names in files of tensors that never train."""
        return ()

    def copied(self, config: C, sites: Collection[Site]) -> Collection[str]:
        """Names in files of copies of these, which may be there; `frozen` takes them."""
        return ()

    def read_config(self, saved: Saved, paths: Collection[str]) -> C:
        """The settings of a file for the linears at these paths, without names of modules. Its patterns
        become names of these linears, as they may need Python's `re`. Raises AdapterError."""
        theirs = {ours: name for name, ours in self.aliases.items()}
        own = {
            one.name: saved.take(theirs.get(one.name, one.name), _default(one))
            for one in dataclasses.fields(self.config)
            if one.name not in _SELECTED
        }
        return self.config(
            **own | {name: peft_entries(name, own[name], paths) for name in _varied(self.config)}
        )

    def written_fields(self, config: C) -> dict[str, Any]:
        """PEFT's fields of the settings, without names of modules."""
        theirs = {ours: name for name, ours in self.aliases.items()}
        return {
            theirs.get(one.name, one.name): getattr(config, one.name)
            for one in dataclasses.fields(config)
            if one.name not in _SELECTED
        }

    def fresh(self, config: C, frame: Frame, generator: torch.Generator) -> Part:
        replaced = fresh_replacements(config.modules_to_save, frame)
        sites = {path: s for path, s in chosen(frame, config.targets).items() if Place(path) not in replaced}
        self._expect_linears(sites.values())
        shared = self.draw_shared(config, generator)
        frozen = self.frozen(config, sites.values(), None)
        bypasses: dict[Place, Bypass] = {}
        for path, settings in config.at(sites).items():
            site = sites[path]
            tensors = self.draw(settings, self.shapes(settings, site), generator)
            own = self.frozen_at(settings, site, None, generator) or frozen
            bypasses[Place(path, self.bypass.side)] = self._made({**tensors, **shared}, site, settings, own)
        return Part(self.name, config, {**bypasses, **replaced})

    def read(self, saved: Saved, frame: Frame) -> Part:
        selection = select(saved, frame, (Kind.LINEAR,), has_layers=True)
        sites = {site.path: site for site in selection.targets}
        self._expect_linears(sites.values())
        init = saved.fields.get("init_weights", True)
        if self.inits and init not in self.inits:
            raise AdapterError(f"{saved.folder}: init_weights={shown(init)} is no beginning of {self.name}'s")
        saved.ignore("fan_in_fan_out", *self.ignored)
        saved.expect_no_biases(self.name)
        note = self._take_forgone(saved)
        config = self.read_config(saved, sites)
        config = replace(config, modules_to_save=tuple(saved.names("modules_to_save")))
        at = config.at(sites)
        shapes = {path: self.shapes(settings, sites[path]) for path, settings in at.items()}
        shared = self.shared_shapes(config)
        names = [f"{PREFIX}{path}.{ending}" for path, own in shapes.items() for ending in own]
        names += [*(f"{MODEL}{name}" for name in shared), *self.stored(config, sites.values())]
        copies = {*copies_of(frame), *self.copied(config, sites.values())}
        saved.expect([*names, *selection.within], allowed=copies)
        together = {name: take_shaped(saved, f"{MODEL}{name}", *shape) for name, shape in shared.items()}
        frozen = self.frozen(config, sites.values(), saved)
        bypasses: dict[Place, Bypass] = {}
        for path, settings in at.items():
            site, tensors = sites[path], dict(together)
            for ending, shape in shapes[path].items():
                tensors[ending] = tensor = saved.tensor(f"{PREFIX}{path}.{ending}")
                expect_shape(site, ending, tensor, *shape)
            own = self.frozen_at(settings, site, saved, None) or frozen
            bypasses[Place(path, self.bypass.side)] = self._made(tensors, site, settings, own, note)
        replaced = take_replacements(saved, frame, selection.within)
        expect_copies(saved, frame)
        return Part(self.name, config, {**bypasses, **replaced})

    def write(self, part: Part) -> Written:
        config = part.config
        assert isinstance(config, self.config)
        replaced, tensors = written_replacements(part.bypasses)
        found: dict[str, dict[str, Any]] = {patterns: {} for patterns in _varied(self.config)}
        paths = []
        for place, bypass in part.bypasses.items():
            if not isinstance(bypass, self.bypass):
                continue
            paths.append(place.path)
            for patterns, one in _varied(self.config).items():
                if (value := getattr(bypass.settings, one.setting)) != getattr(config, one.setting):
                    found[patterns][place.path] = value
            for name, tensor in bypass.parameters().items():
                owner = MODEL if name in bypass.shared else f"{PREFIX}{place.path}."
                tensors[f"{owner}{name}"] = tensor
            tensors |= self.written_frozen(place.path, bypass)
        modules = {"target_modules": sorted(paths), "modules_to_save": sorted(replaced) or None}
        return Written({**self.written_fields(config), **found, **modules}, tensors)

    def written_frozen(self, path: str, bypass: LinearBypass[C]) -> Tensors:
        """Tensors that never train by their names in files; those of all bypasses are asked for by each."""
        return {}

    def _made(self, tensors: Tensors, site: Site, settings: C, frozen: Frozen, note: str = "") -> Bypass:
        dropout = getattr(settings, "dropout", 0.0)
        first = next(iter(tensors.values()))
        return self.bypass(tensors, site, settings, frozen.like(first), dropout, note)

    def _expect_linears(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.transposed and not self.transposed:
                raise AdapterMismatch(
                    f"{site.path} is a linear of GPT-2's kind, and {self.name} stands beside others only, in "
                    "PEFT too"
                )

    def _take_forgone(self, saved: Saved) -> str:
        """Takes the fields of dropouts that coserve has not, and returns what to say about them."""
        rates = {name: saved.take(name, 0.0) for name in self.forgone}
        used = [f"{name}={rate}" for name, rate in rates.items() if rate]
        return f"it was trained with {', '.join(used)}, and trains on without" if used else ""


def take_shaped(saved: Saved, name: str, *shape: int) -> Tensor:
    """Takes a tensor of a file. Raises AdapterMismatch where its shape is another."""
    tensor = saved.tensor(name)
    if (found := tuple(tensor.shape)) != shape:
        raise AdapterMismatch(f"{saved.folder}: {name} is {found}, and would have to be {shape}")
    return tensor


def take_frozen(saved: Saved, shapes: Shapes) -> Frozen:
    """Takes tensors of a file that never train. They are copied: a file's may lie in it, and somebody may
    write to it."""
    return Frozen(
        {name: take_shaped(saved, f"{MODEL}{name}", *shape).clone() for name, shape in shapes.items()}
    )


def without_values(shapes: Shapes) -> Frozen:
    """Tensors of these shapes, where shapes alone count."""
    return Frozen({n: torch.empty(s, dtype=torch.float32, device="meta") for n, s in shapes.items()})


def pieces(x: Tensor, width: int) -> Tensor:
    """The features of x [..., count · width] in consecutive pieces, [..., count, width]."""
    return x.reshape(*x.shape[:-1], -1, width)


def zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros of the type of master weights."""
    return torch.zeros(shape, dtype=torch.float32)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A matrix as PEFT draws most of them: uniform within one over the root of its width."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def _varied(kind: Any) -> Mapping[str, Varies]:
    """The fields of settings of this class that have patterns."""
    return noted(kind, Varies)


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
