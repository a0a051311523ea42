"""Prologues that are calls of the decoder's own modules alone.

Most models embed the tokens, make rotary tables of the positions, and hand both to their layers. Where a
trace of the prologue finds every argument of the layers to be such a call's result, the positions themselves
or a constant, `ShortPrologue` makes the same calls and leaves the rest of the model's Python out. Results
that depend on the rows' positions alone, rotary tables, are computed once for each position.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from coserve.model.batch import LayerCalls

Begun = tuple[Tensor, LayerCalls]  # embeddings [1, rows, width], and the layers' arguments
_CONSTANTS: Final = (type(None), bool, int, float, str)
_ROWS: Final = (6, 9)  # of the batches that a trace is checked with
_TABLED: Final = 8192  # positions that tables have rows for, at most: 4 MiB for heads of 128 in bfloat16
_TOKENS, _POSITIONS = 0, 1  # indices of results


class _Unknown(Exception):
    """A value in the prologue is no result of a module's call."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Stands for a value: element `part` (None: the whole) of result `index`; the token ids and the positions
    are the first two results."""

    index: int
    part: int | None = None


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    """A call of a module, with a `_Known` in place of each value of the run."""

    module: nn.Module
    args: Any
    kwargs: Any

    def run(self, results: Sequence[Any]) -> Any:
        """The call's result, with these of earlier calls."""
        return self.module(*_filled(self.args, results), **_filled(self.kwargs, results))


class _TabledCall:
    """A call whose results, a tuple of tensors [1, rows, width], depend on the rows' positions alone: they
    are computed once for the first `count` positions. Batches with others are left to the call."""

    @torch.no_grad()
    def __init__(self, call: _ModuleCall, results: Sequence[Any], count: int) -> None:
        """`results` are earlier calls' for some rows; zeros of as many rows as positions stand for them."""
        self._call = call
        others = (_zeros_like(each, count) for each in results[2:])
        found = call.run([None, torch.arange(count)[None], *others])
        self._tables: tuple[Tensor, ...] = tuple(made[0].contiguous() for made in found)

    def run(self, results: Sequence[Any]) -> Any:
        """As the call's own."""
        positions = results[_POSITIONS][0]
        try:
            return tuple(table.index_select(0, positions)[None] for table in self._tables)
        except IndexError:
            return self._call.run(results)


def _zeros_like(result: Any, rows: int) -> Any:
    """Zeros in place of hidden states [1, rows, width]; anything else as it is."""
    if not isinstance(result, Tensor) or result.ndim != 3:
        return result
    return result.new_zeros(()).expand(1, rows, result.shape[-1])


class _Trace:
    """The calls of a decoder's children in one run of its prologue, until `stop`."""

    def __init__(self) -> None:
        self.calls: list[_ModuleCall] = []
        self._known: dict[int, tuple[Any, _Known]] = {}  # by identity, and held so that it stays theirs
        self._results = 0
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    def result(self, value: Any) -> None:
        """Names the next result, and its elements."""
        named: list[tuple[Any, int | None]] = [(value, None)]
        if isinstance(value, tuple):
            named += [(element, part) for part, element in enumerate(value)]
        for each, part in named:
            if isinstance(each, Tensor | tuple):  # a module may return what it was given
                self._known.setdefault(id(each), (each, _Known(self._results, part)))
        self._results += 1

    def name(self, value: Any) -> Any:
        """The value with a `_Known` for each tensor in it. Raises _Unknown."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, dict):
            return {key: self.name(each) for key, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)([self.name(each) for each in value])
        if isinstance(value, _CONSTANTS):
            return value
        raise _Unknown

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Records a call; a forward hook."""
        if not self._is_over:
            self.calls.append(_ModuleCall(module, self.name(args), self.name(kwargs)))
            self.result(output)

    @contextmanager
    def of(self, decoder: nn.Module) -> Iterator[None]:
        """Context in which calls of the decoder's children are recorded."""
        hooks = [child.register_forward_hook(self.called, with_kwargs=True) for child in decoder.children()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class ShortPrologue:
    """A traced prologue: `begin` gives the results of the whole one by its calls alone."""

    def __init__(
        self,
        calls: Sequence[_ModuleCall | _TabledCall],
        hidden: Any,
        layers: Any,
        index: tuple[int, ...],
    ) -> None:
        self._calls, self._hidden, self._layers, self._index = calls, hidden, layers, index

    def tabled(self, tokens: Tensor, positions: Tensor, count: int) -> "ShortPrologue":
        """This one with tables for `count` positions in place of the calls that they may stand for, judging
        by one batch of rows: whether they may is to be proved."""
        results: list[Any] = [tokens[None], positions[None]]
        calls: list[_ModuleCall | _TabledCall] = []
        for call in self._calls:
            made = call.run(results)
            results.append(made)
            if isinstance(call, _ModuleCall) and _has_rows(made, len(positions)) and _uses(call):
                calls.append(_TabledCall(call, results[:-1], count))
            else:
                calls.append(call)
        return ShortPrologue(calls, self._hidden, self._layers, self._index)

    def begin(self, tokens: Tensor, positions: Tensor) -> Begun:
        """Embeddings and the layers' arguments for tokens [rows] at positions [rows]."""
        results: list[Any] = [tokens[None], positions[None]]
        for call in self._calls:
            results.append(call.run(results))
        return _filled(self._hidden, results), LayerCalls(_filled(self._layers, results), self._index)


def _has_rows(made: Any, rows: int) -> bool:
    """Tells whether a call's result is a tuple of tensors [1, rows, width]."""
    return isinstance(made, tuple) and all(
        isinstance(each, Tensor) and each.ndim == 3 and each.shape[:2] == (1, rows) for each in made
    )


def _uses(call: _ModuleCall) -> bool:
    """Tells whether a call is given the positions, and no token ids."""
    given = [each for each in tree_flatten((call.args, call.kwargs))[0] if isinstance(each, _Known)]
    return {_POSITIONS} <= {each.index for each in given} and all(each.index != _TOKENS for each in given)


def _filled(value: Any, results: Sequence[Any]) -> Any:
    if isinstance(value, _Known):
        found = results[value.index]
        return found if value.part is None else found[value.part]
    if isinstance(value, dict):
        return {key: _filled(each, results) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_filled(each, results) for each in value])
    return value


@torch.no_grad()
def find_short_prologue(
    decoder: nn.Module,
    whole: Callable[[Tensor, Tensor, Callable[[], object]], Begun],
    vocabulary: int,
    positions: int,
    device: torch.device,
) -> ShortPrologue | None:
    """The short form of a decoder's prologue; None where there is none, or it is not equal bit for bit.

    `whole` runs the prologue of token ids [1, rows] at positions [1, rows], of which there are `positions`,
    and calls its last argument when the first layer is reached.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        drawn = (torch.randint(0, most, (rows,), generator=generator) for most in (vocabulary, positions))
        tokens, places = (each.to(device) for each in drawn)
        return tokens, places

    trace = _Trace()
    tokens, places = (each[None] for each in draw(_ROWS[0]))
    trace.result(tokens)
    trace.result(places)
    try:
        with trace.of(decoder):
            hidden, calls = whole(tokens, places, trace.stop)
        found = ShortPrologue(trace.calls, trace.name(hidden), trace.name(calls.calls), calls.index)
    except _Unknown:
        return None
    batches = [draw(rows) for rows in _ROWS]
    if not _proves(found, whole, batches):
        return None
    if device.type != "cpu":  # where an index beyond a table is no error that can be caught
        return found
    end = min(positions, _TABLED)  # near ones and far ones: some tables change with the farthest of a batch
    near, last = torch.arange(4), torch.arange(max(end - 4, 0), end)
    for places in (near, last, torch.cat([near, last]), torch.randint(end, (40,), generator=generator), near):
        batches.append((torch.randint(vocabulary, places.shape, generator=generator), places))
    try:
        tabled = found.tabled(*batches[0], end)
    except (TypeError, RuntimeError, ValueError, IndexError):  # a module that takes no zeros
        return found
    return tabled if _proves(tabled, whole, batches) else found


def _proves(
    short: ShortPrologue,
    whole: Callable[[Tensor, Tensor, Callable[[], object]], Begun],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> bool:
    """Tells whether a short prologue is equal bit for bit for these token ids and positions, both [rows]."""
    return all(
        _is_same(short.begin(tokens, places), whole(tokens[None], places[None], int))
        for tokens, places in batches
    )


def _is_same(one: Begun, other: Begun) -> bool:
    """Tells whether two prologues gave the same, bit for bit."""
    (leaves, spec), (others, of_other) = (tree_flatten((x[0], x[1].calls, x[1].index)) for x in (one, other))
    return spec == of_other and all(map(_is_equal, leaves, others))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
