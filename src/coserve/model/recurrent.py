"""Recurrent mixers of a base: Mamba, gated delta networks, short convolutions.

A mixer is found by what it does, not by its name: a module of a layer that is given a cache asks it for
states and hands back others (`get_recurrent_state`, `update_conv_state`, ... of transformers' caches). Its
own code runs, given a cache that holds the states of the rows at hand.

The rows of a run are of several sequences, and a state is of one. So the mixer's linears compute all rows at
once, as everywhere, with everybody's adapters: those that are given what the mixer is given (or what such a
linear gave) before, and the one that gives the mixer's output behind. Between them the mixer's own forward is
called for each sequence's rows, or for several sequences of equal length, with its linears standing aside.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.attention.states import States, StateShape
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.recurrent import StatePlaces
from coserve.memory.fake_tensors import is_fake
from coserve.model.base import Base
from coserve.model.linear import FrozenLinear, frozen
from coserve.model.native_mixer import asked, has_row_kernels, updates_places
from coserve.model.placement import Placement
from coserve.model.refusal import unsupported

_ARGUMENTS: Final = ("cache_params", "past_key_values", "past_key_value")  # the cache's names
_ROWS: Final = 5  # of the probe: unlike the kernel of any convolution
_log = logging.getLogger(__name__)

StateKey = tuple[str, int]  # "conv" or "recurrent", and the number of the state in its layer


class WindowCache:
    """The cache that a mixer is given for one window of rows: their states before, and after the run.

    One that `is_recording` has convolutions return their columns as a graph; else a window of one row takes
    the way of decode rows, which write states in place. States before may be `StatePlaces` then.
    """

    def __init__(self, before: Mapping[StateKey, Any], is_recording: bool) -> None:
        self.before, self._is_recording = before, is_recording
        self.after: dict[StateKey, Any] = {}
        self.is_asked = False  # whether it was used as a cache of states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """See transformers' `Cache`, here and below."""
        return self._get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        asked.state = found = self._get(("recurrent", state_idx))
        return found

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns the columns kept before and the new ones, [batch, channels, kept + rows]."""
        self.is_asked, key = True, ("conv", state_idx)
        old = self.before.get(key)
        # Channels stay side by side, as projections give them and kernels read them.
        both = conv_states if old is None else torch.cat((old.to(conv_states.dtype).mT, conv_states.mT), 1).mT
        size = conv_kernel_size or (conv_states if old is None else old).shape[-1]
        if both.shape[-1] < size:
            both = nn.functional.pad(both, (size - both.shape[-1], 0))
        self.after[key] = both[..., -size:]
        return both

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.is_asked = True
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Any:
        """See transformers' `MiniMaxCache`, here and below."""
        return self._get(("recurrent", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self._is_recording

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        self.is_asked = True
        return bool(self.before)

    def _get(self, key: StateKey) -> Any:
        self.is_asked = True
        return self.before.get(key)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A linear that computes all rows at once: given the mixer's input times `factor`, or the output of the
    flat linear `source`."""

    path: str
    source: str = ""
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """Uses that a mixer makes of a cache and its linears: the names of its first argument and of its cache,
    its states, its flat linears in order, the linear that gives its output (empty where none does), the width
    behind which that stands, the number of values that it returns (0: one, in no tuple), and the names of its
    `others`, arguments without a default, which it is given None for. One that goes on `by_rows` starts a
    window of several rows without a state, and is called for each row after one (Mamba 1 where its code is
    its own). One that is `in_place` takes `StatePlaces` as states of decode rows."""

    first: str
    argument: str
    keys: tuple[StateKey, ...]
    shapes: tuple[StateShape, ...]
    flat: tuple[_Flat, ...]
    last: str
    width: int
    returns: int
    others: tuple[str, ...] = ()
    by_rows: bool = False
    in_place: bool = False

    def given(self, cache: WindowCache) -> dict[str, Any]:
        """The arguments beside the first one."""
        return {self.argument: cache, **dict.fromkeys(self.others)}


class Mixer:
    """A recurrent mixer of a base, in place of the bound `forward` of its module. `number` is its place among
    all, `layer` the layer that it is in."""

    def __init__(self, number: int, layer: int, path: str, base: Base, anatomy: _Anatomy) -> None:
        self.number, self.layer, self.path = number, layer, path
        self.anatomy, self.cell = anatomy, base.cell
        self._model, self._block = base.model, base.chain.blocks[layer]
        self._like = torch.empty(0, dtype=base.dtype, device=base.device)
        self._graphs: dict[int, int] = {}  # bytes by rows
        module = self._module = base.model.get_submodule(path)
        linears = [flat.path for flat in anatomy.flat] + [anatomy.last] * bool(anatomy.last)
        self._linears = {one: attrgetter(one.removeprefix(f"{path}.")) for one in linears}
        self.forward: Any = module.forward
        module.forward = self._pass

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        """The tensors of its state."""
        return self.anatomy.shapes

    def graph_nbytes(self, rows: int) -> int:
        """See `RecurrentMixer`. Counted once, in a run of random rows."""
        if rows and rows not in self._graphs:
            kept: dict[int, Tensor] = {}  # by their storages, and held so that these stay theirs

            def note(x: Tensor) -> Tensor:
                kept[x.untyped_storage()._cdata] = x
                return x

            width = self._model.config.get_text_config().hidden_size
            x = self._like.new_empty(1, rows, width).normal_().requires_grad_()
            saving = torch.autograd.graph.saved_tensors_hooks(note, _same)
            with torch.enable_grad(), saving, self._block.visit(Direction.BACKWARD):
                self.forward(x, **self.anatomy.given(WindowCache({}, True)))
            self._graphs[rows] = sum(x.untyped_storage().nbytes() for x in kept.values())
        return self._graphs.get(rows, 0)

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        rows, its = self.cell.rows, self.anatomy
        if rows is None:
            return self.forward(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs[its.first]
        given: dict[str, Tensor] = {}
        for flat in its.flat:
            x = given[flat.source] if flat.source else hidden
            given[flat.path] = self._linears[flat.path](self._module)(
                x if flat.factor == 1.0 else x * flat.factor
            )
        out = rows.mix(MixerRun(self, hidden, given))
        if its.last:
            out = self._linears[its.last](self._module)(out)
        return (out, *[None] * (its.returns - 1)) if its.returns else out


class MixerRun:
    """A mixer in one run: the `Core` of its rows, hidden [1, rows, width], whose flat linears have `given`
    their outputs."""

    def __init__(self, mixer: Mixer, hidden: Tensor, given: Mapping[str, Tensor]) -> None:
        self.number, self.layer = mixer.number, mixer.layer
        self._mixer, self._hidden, self._given = mixer, hidden, given

    def run(
        self, rows: slice, batch: int, before: States | None, trains: bool = False
    ) -> tuple[Tensor, States]:
        """See `Core`. In a graph the states are in it, too."""
        x, given = _of(self._hidden, rows, batch), {p: _of(y, rows, batch) for p, y in self._given.items()}
        if before is None or not self._mixer.anatomy.by_rows:
            several: Tensor | None = None
            if trains and before is not None and x.shape[1] == 1:
                twice = {path: y.repeat(1, 2, 1) for path, y in given.items()}
                several = self._call(x.repeat(1, 2, 1), twice, before, trains)[0][:, :1]
            out, before = self._call(x, given, before, trains)  # which may write into them
            out = out if several is None else several
        else:
            outputs = []
            for row in range(x.shape[1]):
                one = slice(row, row + 1)
                own = {path: y[:, one] for path, y in given.items()}
                out, before = self._call(x[:, one], own, before, trains)
                outputs.append(out)
            out = torch.cat(outputs, 1)
        return out.reshape(1, -1, out.shape[-1]), before

    def update(self, rows: slice, states: Sequence[StatePlaces]) -> Tensor | None:
        """See `Core`."""
        if not (self._mixer.anatomy.in_place and has_row_kernels(self._hidden)):
            return None
        count = rows.stop - rows.start
        x, given = _of(self._hidden, rows, count), {p: _of(y, rows, count) for p, y in self._given.items()}
        out, _ = self._call(x, given, states, trains=False)
        return out.reshape(1, -1, out.shape[-1])

    def _call(
        self, x: Tensor, given: Mapping[str, Tensor], before: Sequence[Any] | None, trains: bool
    ) -> tuple[Tensor, States]:
        """The mixer's own forward of x [batch, rows, width], without the linear behind it; and the states."""
        its, cell = self._mixer.anatomy, self._mixer.cell
        is_one, in_graph = x.shape[1] == 1, torch.is_grad_enabled()
        states = dict(zip(its.keys, before or (), strict=before is not None))
        if is_one and in_graph:  # written in place, which a leaf does not allow
            states = {key: state.clone() for key, state in states.items()}
        cache = WindowCache(states, in_graph or trains or not is_one)
        inside = _Inside(its.last, given)
        # What is written in place was saved for the gradient before.
        saving = torch.autograd.graph.saved_tensors_hooks(torch.clone, _same) if is_one and in_graph else None
        outside, cell.rows = cell.rows, inside
        try:
            with saving or nullcontext():
                out = self._mixer.forward(x, **its.given(cache))
        finally:
            cell.rows, asked.state = outside, None
        found = out[0] if isinstance(out, tuple) else out
        if its.last:
            assert inside.left is not None, "the mixer's last linear gives its output"
            found = inside.left
        return found, tuple(cache.after[key] if key in cache.after else states[key] for key in its.keys)

    def zeros(self, rows: int) -> Tensor:
        """See `Core`."""
        return self._hidden.new_zeros(1, rows, self._mixer.anatomy.width)


def _same(x: Tensor) -> Tensor:
    return x


def _of(x: Tensor, rows: slice, batch: int) -> Tensor:
    """Some rows of x [1, rows, width] as [batch, rows each, width]."""
    count = rows.stop - rows.start
    return (x if count == x.shape[1] else x[:, rows]).reshape(batch, count // batch, x.shape[-1])


class _Inside:
    """Rows while a mixer runs between its linears: those before it have computed, the one behind it will.
    `left` is what the latter was given."""

    def __init__(self, last: str, given: Mapping[str, Tensor]) -> None:
        self._last, self._given = last, given
        self.left: Tensor | None = None

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        if path in self._given:
            return self._given[path]
        if path == self._last:
            self.left = x
            return x  # the mixer returns what it is given here
        return frozen(x, placement)

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        return y

    def changed(self, path: str) -> int:
        return 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise AssertionError("a mixer with states attends to nothing")

    def mix(self, core: Any) -> Tensor:
        raise AssertionError("a mixer has no other one inside")


@torch.no_grad()
def find_mixers(base: Base) -> list[Mixer]:
    """Finds the recurrent mixers of a base, and has them split the rows of a run by sequence; before sites
    are hooked. Raises UnsupportedModel for one that cannot be run alone."""
    found: list[Mixer] = []
    for layer, block in enumerate(base.chain):
        with block.visit(Direction.INFER):
            inside: list[tuple[str, _Anatomy]] = []
            for name, module in block.module.named_modules():
                path = f"{block.path}.{name}"
                if name and (anatomy := _anatomy_of(base, path, module)) is not None:
                    inside.append((path, anatomy))
        for path, anatomy in inside:
            if not any(other.startswith(f"{path}.") for other, _ in inside):
                found.append(Mixer(len(found), layer, path, base, anatomy))
    return found


def _anatomy_of(base: Base, path: str, module: nn.Module) -> _Anatomy | None:
    """The anatomy of a module that uses states of a cache; None for any other."""
    parameters = [*signature(type(module).forward).parameters.values()][1:]
    names = [each.name for each in parameters]
    argument = next((name for name in _ARGUMENTS if name in names), None)
    if argument is None:
        return None
    text = base.model.config.get_text_config()
    like = next(module.parameters(), None)
    if like is None:
        return None
    others = tuple(
        each.name
        for each in parameters[1:]
        if each.name != argument and each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    )
    cache, calls = WindowCache({}, True), list[tuple[str, Tensor, Tensor]]()
    hidden = torch.randn(1, _ROWS, text.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(base.device, base.dtype)
    with ExitStack() as hooks:
        for name, linear in module.named_modules():
            if type(linear) in (nn.Linear, Conv1D, FrozenLinear):
                hook = _Noting(f"{path}.{name}", calls)
                hooks.callback(linear.register_forward_hook(hook).remove)
        try:
            out = module(hidden, **{argument: cache}, **dict.fromkeys(others))
        except Exception as error:
            if not cache.is_asked:
                return None  # attention, which asks for other arguments
            _log.warning("%s cannot be run alone: %s: %s", path, type(error).__name__, error)
            part = "one of its recurrent layers cannot be run on its own (the log has the error)"
            if isinstance(error, AttributeError) and error.obj is cache:
                part = "its attention has states of its own beside keys and values"
            raise unsupported(base.model.config.model_type, part) from error
    if not cache.after:
        return None
    returned = out[0] if isinstance(out, tuple) else out
    keys = tuple(sorted(cache.after))
    shapes = tuple(StateShape(tuple(cache.after[key].shape[1:]), cache.after[key].dtype) for key in keys)
    last = next((name for name, _, y in calls if y is returned), "")
    width = next((x.shape[-1] for name, x, _ in calls if name == last), returned.shape[-1])
    flat = _flat(module, hidden, [call for call in calls if call[0] != last])
    returns = len(out) if isinstance(out, tuple) else 0
    anatomy = _Anatomy(names[0], argument, keys, shapes, flat, last, width, returns, others)

    def run(x: Tensor, given: Mapping[StateKey, Any]) -> tuple[Tensor, Mapping[StateKey, Any]]:
        own = WindowCache(given, x.shape[1] > 1)
        out = module(x, **anatomy.given(own))
        asked.state = None
        return (out[0] if isinstance(out, tuple) else out), {**given, **own.after}

    def run_by_rows(x: Tensor, given: Mapping[StateKey, Any]) -> tuple[Tensor, Mapping[StateKey, Any]]:
        outputs, given = [], {key: state.clone() for key, state in given.items()}  # one row writes into it
        for row in torch.split(x, 1, 1):
            out, given = run(row, given)
            outputs.append(out)
        return torch.cat(outputs, 1), given

    forgets = _forgets(module, anatomy, hidden, cache.after)
    exactly = partial(run_by_rows if forgets else run, hidden)
    runs = partial(run, hidden[:, :2].transpose(0, 1)), partial(run, hidden)
    in_place = updates_places(module, *runs, cache.after, exactly)
    return replace(anatomy, by_rows=forgets and not in_place, in_place=in_place)


def _forgets(module: nn.Module, anatomy: _Anatomy, hidden: Tensor, states: Mapping[StateKey, Tensor]) -> bool:
    """Tells whether one of the states makes no difference to a window of several rows."""

    def run(given: Mapping[StateKey, Tensor]) -> Tensor:
        out = module(hidden, **anatomy.given(WindowCache(given, True)))
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    if is_fake(hidden):  # without data nothing is compared
        return False
    own = run(states)
    return any(torch.equal(own, run({**states, key: state + 1})) for key, state in states.items())


class _Noting:
    """Notes what a linear is given and gives; a module's hook."""

    def __init__(self, path: str, calls: list[tuple[str, Tensor, Tensor]]) -> None:
        self._path, self._calls = path, calls

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        self._calls.append((self._path, given[0], y))


def _flat(
    module: nn.Module, hidden: Tensor, calls: Sequence[tuple[str, Tensor, Tensor]]
) -> tuple[_Flat, ...]:
    """The linears whose input follows from the mixer's input row by row."""
    factors = (1.0, *(value for value in vars(module).values() if isinstance(value, float)))
    found: dict[str, tuple[_Flat, Tensor]] = {}
    for path, x, y in calls:
        source = next((name for name, (_, given) in found.items() if given is x), "")
        if path in found:
            continue
        if source:
            found[path] = _Flat(path, source), y
        elif (factor := next((f for f in factors if _is_same(x, hidden, f)), None)) is not None:
            found[path] = _Flat(path, factor=factor), y
    return tuple(flat for flat, _ in found.values())


def _is_same(x: Tensor, hidden: Tensor, factor: float) -> bool:
    """Tells whether x is hidden times a factor; without data, whether it may be."""
    if x is hidden or x.shape != hidden.shape:
        return x is hidden and factor == 1.0
    return is_fake(x) or torch.equal(x, hidden if factor == 1.0 else hidden * factor)
