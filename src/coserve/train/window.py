"""A window of training rows: its examples, the keys and values before them, and its attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.attention import (
    Attended,
    AttentionSpec,
    attend,
    attend_allowed,
    attend_allowed_keeping,
    attend_keeping,
    causal_mask,
)
from coserve.kernels.cpu import row_buckets
from coserve.kernels.rows import concat_rows


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [start, start + rows) of a micro-batch and their examples.

    `past` rows before `start` belong to the window's first example; `pieces` are the rows of each example in
    the window, in order. If the micro-batch begins with the adapter's prompt, which precedes every example,
    `before` of its rows precede the window and `prompt` of them are the window's first.

    Of a window in a graph the device alone knows the examples: `examples` [past + rows] has the number of
    each row's, which rows of no other example have, and `pieces` say nothing.
    """

    start: int
    rows: int
    past: int
    pieces: tuple[int, ...]
    before: int = 0
    prompt: int = 0
    examples: Tensor | None = field(default=None, compare=False)

    @staticmethod
    def of(lengths: tuple[int, ...], start: int, rows: int, prompt: int = 0) -> "Window":
        """`prompt` rows precede all examples; they are the first of `lengths`, if any."""
        before = min(start, prompt)
        pieces, past, begin = [], 0, prompt
        for length in lengths[bool(prompt) :]:
            first, last = max(begin, start), min(begin + length, start + rows)
            if first < last:
                pieces.append(last - first)
                past = past if len(pieces) > 1 else first - begin
            begin += length
        return Window(start, rows, past, tuple(pieces), before, min(start + rows, prompt) - before)

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.rows)

    @property
    def past_span(self) -> slice:
        return slice(self.start - self.past, self.start)


KV = tuple[Tensor, Tensor]  # keys [1, groups, rows, dk] and values [1, groups, rows, dv]


@dataclass(frozen=True, slots=True)
class PastKV:
    """Keys and values that a window's rows attend to beside those of the layer's own pass; None if there are
    none.

    `given` are virtual keys and values, `prompt` those of the prompt's rows before the window: both precede
    every example. `own` are those of the rows of the window's first example before the window. `shared` are
    the window's own, where the layer reads another layer's.
    """

    given: KV | None = None
    prompt: KV | None = None
    own: KV | None = None
    shared: KV | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are not None, in order: keys, values, keys, values."""
        pairs = (self.given, self.prompt, self.own, self.shared)
        return tuple(tensor for pair in pairs if pair is not None for tensor in pair)

    @property
    def ahead(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys, and values, that precede every example."""
        pairs = [pair for pair in (self.given, self.prompt) if pair is not None]
        return [keys for keys, _ in pairs], [values for _, values in pairs]

    def as_leaves(self) -> "PastKV":
        """The same tensors as leaves of a graph."""
        return PastKV(*(pair and _leaves(pair) for pair in (self.given, self.prompt, self.own, self.shared)))


def _leaves(pair: KV) -> KV:
    return pair[0].detach().requires_grad_(), pair[1].detach().requires_grad_()


def attend_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: PastKV,
    window: Window,
    spec: AttentionSpec,
    kept: Attended | None = None,
) -> Tensor:
    """Attention of a window's rows, each within its own example and to everything before every example; in
    the current graph, if there is one. Outputs in `kept` are not recomputed, except in a graph of a device.

    q [1, heads, rows, dk], k [1, groups, rows, dk], v [1, groups, rows, dv]; returns [1, rows, heads, dv].
    """
    if window.examples is not None:
        return attend_allowed(q, *_allowed(k, v, past, window.examples, spec), spec).transpose(1, 2)
    outputs = []
    for piece in _pieces(q, k, v, past, window):
        given = None if kept is None else _kept_of(piece.rows, kept)
        outputs.append(piece.rows.back(attend(*piece.tensors, spec, given)))
    return concat_rows(outputs, 1)


def attend_window_keeping(
    q: Tensor, k: Tensor, v: Tensor, past: PastKV, window: Window, spec: AttentionSpec
) -> Attended:
    """As `attend_window`, without a graph; returns the tensors for backward: out [1, rows, heads, dv] and lse
    [1, rows, heads]."""
    if window.examples is not None:
        found = attend_allowed_keeping(q, *_allowed(k, v, past, window.examples, spec), spec)
        return Attended(found.out.transpose(1, 2), found.lse.transpose(1, 2))
    outs, lses = [], []
    for piece in _pieces(q, k, v, past, window):
        found = attend_keeping(*piece.tensors, spec)
        outs.append(piece.rows.back(found.out))
        lses.append(piece.rows.back(found.lse[..., None]).squeeze(-1))
    return Attended(concat_rows(outs, 1), concat_rows(lses, 1))


class _SomeRows(Protocol):
    """Some of a window's rows, in attention's layout."""

    def of(self, x: Tensor) -> Tensor:
        """[1, heads, window rows, width] to [batch, heads, t, width]."""

    def back(self, x: Tensor) -> Tensor:
        """[batch, heads, t, width] to [1, rows, heads, width]."""


@dataclass(frozen=True, slots=True)
class _Together:
    """Rows [start, stop) of one example."""

    start: int
    stop: int

    def of(self, x: Tensor) -> Tensor:
        # A slice of everything would cost a zeroed gradient and a copy on the way back.
        return x if self.stop - self.start == x.shape[2] else x[:, :, self.start : self.stop]

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _SideBySide:
    """Whole examples from row `start` on as a batch, padded on the right, which causal attention never
    reads."""

    def __init__(self, start: int, pieces: Sequence[int], device: torch.device) -> None:
        self._count, self._longest = len(pieces), row_buckets(device).pad_rows(max(pieces))
        lengths = torch.tensor(pieces, device=device)
        offsets = start + lengths.cumsum(0) - lengths
        column = torch.arange(self._longest, device=device)
        self._rows = (offsets[:, None] + column.minimum(lengths[:, None] - 1)).flatten()
        # Indices of the real rows, without reading values, which would wait for the device.
        total = sum(pieces)
        shifts = torch.arange(self._count, device=device) * self._longest - (offsets - start)
        self._real = shifts.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=device)

    def of(self, x: Tensor) -> Tensor:
        heads, width = x.shape[1], x.shape[-1]
        return x[0].index_select(1, self._rows).view(heads, self._count, self._longest, width).transpose(0, 1)

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self._real)[None]


@dataclass(frozen=True, slots=True)
class _Even:
    """As `_SideBySide`, for examples of equal length: no padding, and no copy of rows."""

    start: int
    count: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        heads, rows = x.shape[1], self.count * self.length
        if x.shape[2] != rows:
            x = x[:, :, self.start : self.start + rows]
        return x.view(heads, self.count, self.length, x.shape[-1]).transpose(0, 1)

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)[None]


def _beside(start: int, pieces: Sequence[int], device: torch.device) -> _SomeRows:
    """Whole examples from row `start` on, as separate sequences."""
    first = pieces[0]
    if len(pieces) == 1:
        return _Together(start, start + first)
    if set(pieces) == {first} and row_buckets(device).pad_rows(first) == first:
        return _Even(start, len(pieces), first)
    return _SideBySide(start, pieces, device)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that attend in one call, and their queries, keys and values."""

    rows: _SomeRows
    tensors: tuple[Tensor, Tensor, Tensor]


def _kept_of(rows: _SomeRows, kept: Attended) -> Attended:
    """The kept attention outputs of these rows."""
    lse = rows.of(kept.lse[..., None].transpose(1, 2))
    return Attended(rows.of(kept.out.transpose(1, 2)), lse.squeeze(-1))


def _pieces(q: Tensor, k: Tensor, v: Tensor, past: PastKV, window: Window) -> Iterator[_Piece]:
    """A window's rows in order: of the prompt, of the example continued from before, of whole examples."""
    pieces = list(window.pieces)
    keys, values = past.ahead
    start = window.prompt
    if start:
        rows: _SomeRows = _Together(0, start)
        keys, values = [_joined(keys, rows.of(k))], [_joined(values, rows.of(v))]
        yield _Piece(rows, (rows.of(q), keys[0], values[0]))
    if past.own is not None:
        own = _Together(start, start + pieces.pop(0))
        rows, start = own, own.stop
        joined = _joined([*keys, past.own[0]], rows.of(k)), _joined([*values, past.own[1]], rows.of(v))
        yield _Piece(rows, (rows.of(q), *joined))
    if pieces:
        rows = _beside(start, pieces, q.device)
        yield _Piece(rows, (rows.of(q), _joined(keys, rows.of(k)), _joined(values, rows.of(v))))


def _allowed(
    k: Tensor, v: Tensor, past: PastKV, examples: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of a window's rows and of those before it, and which of them each row attends to,
    [rows, keys]."""
    rows = k.shape[2]
    if past.own is not None:
        k, v = torch.cat([past.own[0], k], 2), torch.cat([past.own[1], v], 2)
    own = examples[-rows:, None] == examples
    return k, v, own & causal_mask(rows, k.shape[2], spec.window, k.device)


def _joined(ahead: list[Tensor], own: Tensor) -> Tensor:
    """`own` [batch, groups, rows, width] after the rows before each example, [1, groups, n, width]."""
    if not ahead:
        return own
    return torch.cat([*(x.expand(own.shape[0], -1, -1, -1) for x in ahead), own], dim=2)
