"""Windows of several micro-batches side by side: one pass through a layer, and one way back, for all of them.

The frozen base multiplies all rows at once. What is an adapter's own stays with its rows: a NaN among them
reaches nobody else's, and each gets the gradients that it would get alone. Low-rank products of all of them
are a few large ones (`kernels/beside.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from coserve.adapters.abreast import plain_segments
from coserve.adapters.bypass import Bypass
from coserve.adapters.lowrank import is_plain
from coserve.kernels.attention import Attended, AttentionSpec
from coserve.kernels.beside import Beside, Ways
from coserve.model.batch import Keeper
from coserve.model.graph import stand_in
from coserve.model.linear import Placement, bypassed, frozen
from coserve.train.backward import BackwardWindow, vjp
from coserve.train.save_policy import Fate
from coserve.train.tape import KeptWindow, Tape
from coserve.train.window import Pair, Past, Window, attend_window, attend_window_keeping

# Gradients of one window's part in a layer: see `BackwardWindow.take`.
Share = tuple[Sequence[Tensor | None], Sequence[Tensor], Tensor | None]


class KeptWindowGroup:
    """Windows of several tapes in a fused forward run: one `Part` of it, and its `Keeper`."""

    def __init__(self, windows: Sequence[KeptWindow]) -> None:
        self._windows = windows
        self._sizes = [window.count for window in windows]
        self._whole = _whole([(w.tape, w.window) for w in windows])
        self.count = sum(self._sizes)

    @property
    def keeper(self) -> Keeper | None:
        return self if any(window.keeper for window in self._windows) else None

    def keep(self, path: str, product: Tensor) -> None:
        for window, rows in zip(self._windows, torch.split(product, self._sizes), strict=True):
            window.keep(path, rows)

    def keep_sum(self, path: str, y: Tensor) -> None:
        for window, rows in zip(self._windows, torch.split(y, self._sizes), strict=True):
            window.keep_sum(path, rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        parts = list(zip(self._windows, *(torch.split(x, self._sizes, 2) for x in (q, k, v)), strict=True))
        if self._whole is None:
            return torch.cat([window.attend(layer, *rows, spec) for window, *rows in parts], dim=1)
        if spec.reads is None:
            for window, _, keys, values in parts:
                window.tape.keep_cache(layer, window.window, keys[0], values[0])
        else:
            k, v = _joined([window.tape.cache(spec.reads, window.window) for window in self._windows])
        keeping = [i for i, w in enumerate(self._windows) if w.keeps_attention(layer)]
        if not keeping:
            return attend_window(q, k, v, Past(), self._whole, spec)
        attended = attend_window_keeping(q, k, v, Past(), self._whole, spec)
        of_each = list(zip(*(torch.split(x, self._sizes, 1) for x in attended), strict=True))
        for i in keeping:
            self._windows[i].tape.keep_attended(layer, self._windows[i].window, Attended(*of_each[i]))
        return attended.out


class ReplayedWindowGroup:
    """As `ReplayedRows`, for windows of several tapes side by side."""

    def __init__(self, windows: Sequence[BackwardWindow], past: Sequence[Past]) -> None:
        self._tapes = [r.backward.tape for r in windows]
        self._windows = [r.window for r in windows]
        self._sizes = [r.window.rows for r in windows]
        self._spans = [slice(*span) for span in pairwise(accumulate(self._sizes, initial=0))]
        self._bypasses = [r.bypasses for r in windows]
        self._past = past
        self._ways: Ways = {}
        self._whole = _whole(list(zip(self._tapes, self._windows, strict=True)))
        self.current: Pair | None = None

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        entering = [b.inputs.get(path) for b in self._bypasses]
        if any(b is not None for b in entering):
            x2 = x.flatten(0, -2)
            x = self._added(entering, x2, x2).view(x.shape)
        kept = self._kept(path, x, placement)
        bypasses = [b.outputs.get(path) for b in self._bypasses]
        fates = [tape.fates.of(path) for tape in self._tapes]
        segments = plain_segments(
            (span, bypass, kept is not None and fate is not Fate.KEPT)
            for span, bypass, fate in zip(self._spans, bypasses, fates, strict=True)
        )
        y = (
            bypassed(x, placement, Beside(segments, self._ways), kept)
            if segments
            else frozen(x, placement, kept)
        )
        others = [None if is_plain(b) else b for b in bypasses]
        if any(b is not None for b in others):
            y = self._added(others, x.flatten(0, -2), y.flatten(0, -2)).view(y.shape)
        return self._summed(path, y)

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        bypasses = [b.outputs.get(path) for b in self._bypasses]
        return self._added(bypasses, x[0], y[0])[None] if any(b is not None for b in bypasses) else y

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.reads is None:
            self.current = (k, v)
            cached = _joined([t.cache(layer, w) for t, w in self._each()])
            k, v = stand_in(k, cached[0]), stand_in(v, cached[1])
        else:
            k, v = _joined([past.shared for past in self._past if past.shared is not None])
        attended = [t.attended(layer, w) for t, w in self._each()]
        if self._whole is not None:
            found = [of for of in attended if of is not None]
            kept = None
            if len(found) == len(attended):
                kept = Attended(*(torch.cat(x, 1) for x in zip(*found, strict=True)))
            return attend_window(q, k, v, Past(), self._whole, spec, kept)
        queries, keys, values = (torch.split(x, self._sizes, 2) for x in (q, k, v))
        outs = [
            attend_window(queries[i], keys[i], values[i], self._past[i], window, spec, attended[i])
            for i, window in enumerate(self._windows)
        ]
        return torch.cat(outs, dim=1)

    def _each(self) -> Iterator[tuple[Tape, Window]]:
        return zip(self._tapes, self._windows, strict=True)

    def _added(self, bypasses: Sequence[Bypass | None], x: Tensor, y: Tensor) -> Tensor:
        """y [rows, out] with everybody's bypass; x [rows, in]."""
        parts = zip(bypasses, torch.split(x, self._sizes), torch.split(y, self._sizes), strict=True)
        return torch.cat([y if bypass is None else bypass.add(x, y) for bypass, x, y in parts])

    def _kept(self, path: str, x: Tensor, placement: Placement) -> Tensor | None:
        """What stands for the product, where all tapes have it or nobody needs it."""
        fates = [tape.fates.of(path) for tape in self._tapes]
        if Fate.COMPUTED in fates:
            return None
        width = self._tapes[0].base.linears[path].out_features
        shape = (*x.shape[:-1], width)
        if not {Fate.KEPT, Fate.SUM} & set(fates):
            return x.new_zeros(()).expand(shape)
        parts = [
            tape.product(path, window)
            if fate in (Fate.KEPT, Fate.SUM)
            else x.new_zeros(()).expand(window.rows, width)
            for fate, (tape, window) in zip(fates, self._each(), strict=True)
        ]
        return torch.cat(parts).view(shape)

    def _summed(self, path: str, y: Tensor) -> Tensor:
        fates = [tape.fates.of(path) for tape in self._tapes]
        if Fate.SIGN not in fates:
            return y
        of_each = zip(fates, self._each(), torch.split(y.detach().flatten(0, -2), self._sizes), strict=True)
        parts = [
            tape.signed(path, window, own) if fate is Fate.SIGN else own
            for fate, (tape, window), own in of_each
        ]
        return stand_in(y, torch.cat(parts).view(y.shape))


def through_layer(layer: int, windows: Sequence[BackwardWindow]) -> list[Share]:
    """Re-runs a layer for the rows of several jobs at once and goes back through it.

    Returns what each window's `BackwardWindow.take` is to be given; changes none of them. All windows agree
    on whether the gradient of the layer's input is needed.
    """
    base = windows[0].backward.tape.base
    leaves = [leaf for r in windows for leaf in r.backward.leaves(layer)]
    past = [r.backward.tape.past(layer, r.window).as_leaves() for r in windows]
    asks = windows[0].asks(layer)
    x = torch.cat([r.input(layer) for r in windows], dim=1).requires_grad_(asks)
    rows = ReplayedWindowGroup(windows, past)
    with torch.enable_grad(), base.cell.set(rows):
        out = base.layer(layer, x, base.arguments.concat([r.calls for r in windows]))
    outputs, gradients = [out], [torch.cat([r.gradient for r in windows], dim=1)]
    owed = None if rows.current is None else _owed(layer, windows, rows.current)
    if owed is not None:
        assert rows.current is not None
        outputs += rows.current
        gradients += owed
    earlier = [tensor for of in past for tensor in of.tensors]
    found = vjp(outputs, gradients, [*leaves, *earlier, *((x,) if asks else ())])
    sizes = [r.window.rows for r in windows]
    below = torch.split(found[-1], sizes, dim=1) if asks else [None] * len(windows)
    own, rest = iter(found), iter(found[len(leaves) :])
    return [
        ([next(own) for _ in r.backward.leaves(layer)], [next(rest) for _ in of.tensors], of_input)
        for r, of, of_input in zip(windows, past, below, strict=True)
    ]


def _joined(pairs: Sequence[Pair]) -> Pair:
    """Keys, and values, of windows end to end."""
    return torch.cat([k for k, _ in pairs], 2), torch.cat([v for _, v in pairs], 2)


def _owed(layer: int, windows: Sequence[BackwardWindow], current: Pair) -> Pair | None:
    """What all rows' keys and values are owed, [1, groups, rows, width]; None if nothing."""
    found = [r.owed(layer) for r in windows]
    if all(pair is None for pair in found):
        return None
    sizes = [r.window.rows for r in windows]
    parts = zip(found, *(torch.split(x.detach(), sizes, 2) for x in current), strict=True)
    pairs = [(torch.zeros_like(k), torch.zeros_like(v)) if own is None else own for own, k, v in parts]
    keys, values = (torch.cat(x, 2) for x in zip(*pairs, strict=True))
    return keys, values


def _whole(windows: Sequence[tuple[Tape, Window]]) -> Window | None:
    """All windows as one, where nothing stands before any of their examples."""
    if any(w.past or w.before or w.prompt or tape.has_given for tape, w in windows):
        return None
    pieces = tuple(piece for _, w in windows for piece in w.pieces)
    return Window(0, sum(w.rows for _, w in windows), 0, pieces)
