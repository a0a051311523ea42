"""A window of training rows: whose rows it has, what stands before them, and how they attend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.core.grid import on_grid
from coserve.kernels.attention import AttentionSpec, attend


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [start, start + rows) of a micro-batch and how they fall on its examples.

    `past` rows before `start` belong to the window's first example; `pieces` are the rows each example
    has in the window, in order. Where the micro-batch begins with the adapter's prompt, which stands before
    every example, `before` of its rows precede the window and `prompt` of them are the window's first.
    """

    start: int
    rows: int
    past: int
    pieces: tuple[int, ...]
    before: int = 0
    prompt: int = 0

    @staticmethod
    def of(lengths: tuple[int, ...], start: int, rows: int, prompt: int = 0) -> "Window":
        """`prompt` rows stand before all examples; they are the first of `lengths`, if any."""
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


Pair = tuple[Tensor, Tensor]  # keys [1, groups, rows, dk] and values [1, groups, rows, dv]


@dataclass(frozen=True, slots=True)
class Past:
    """What a window's rows may attend to beside their own; None where there is nothing.

    `given` are virtual tokens that are keys and values, `prompt` the rows of a prompt before the window: both
    stand before every example. `own` are the rows of the window's first example before the window.
    """

    given: Pair | None = None
    prompt: Pair | None = None
    own: Pair | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there are, in order."""
        pairs = (self.given, self.prompt, self.own)
        return tuple(tensor for pair in pairs if pair is not None for tensor in pair)

    @property
    def ahead(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys, and values, of what stands before every example."""
        pairs = [pair for pair in (self.given, self.prompt) if pair is not None]
        return [keys for keys, _ in pairs], [values for _, values in pairs]

    def as_leaves(self) -> "Past":
        """The same as leaves of a graph."""
        return Past(*(pair and _leaves(pair) for pair in (self.given, self.prompt, self.own)))


def _leaves(pair: Pair) -> Pair:
    return pair[0].detach().requires_grad_(), pair[1].detach().requires_grad_()


def attend_window(q: Tensor, k: Tensor, v: Tensor, past: Past, window: Window, spec: AttentionSpec) -> Tensor:
    """Attention of a window's rows, each within its own example and what stands before all; differentiable.

    q [1, heads, rows, dk], k [1, groups, rows, dk], v [1, groups, rows, dv]; returns [1, rows, heads, dv].
    """
    outputs = []
    pieces = list(window.pieces)
    keys, values = past.ahead
    start = window.prompt
    if start:
        first = slice(start)
        keys, values = [_joined(keys, k[:, :, first])], [_joined(values, v[:, :, first])]
        outputs.append(attend(q[:, :, first], keys[0], values[0], spec).transpose(1, 2))
    if past.own is not None:
        first = slice(start, start + pieces.pop(0))
        own_keys = _joined([*keys, past.own[0]], k[:, :, first])
        own_values = _joined([*values, past.own[1]], v[:, :, first])
        outputs.append(attend(q[:, :, first], own_keys, own_values, spec).transpose(1, 2))
        start = first.stop
    if start:  # a slice of everything would cost a zeroed gradient and a copy on the way back
        q, k, v = q[:, :, start:], k[:, :, start:], v[:, :, start:]
    if len(pieces) == 1:
        outputs.append(attend(q, _joined(keys, k), _joined(values, v), spec).transpose(1, 2))
    elif pieces:
        outputs.append(_attend_side_by_side(q, k, v, (keys, values), pieces, spec))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _joined(ahead: list[Tensor], own: Tensor) -> Tensor:
    """`own` [batch, groups, rows, width] after what stands before each example, [1, groups, n, width]."""
    if not ahead:
        return own
    return torch.cat([*(x.expand(own.shape[0], -1, -1, -1) for x in ahead), own], dim=2)


def _attend_side_by_side(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ahead: tuple[list[Tensor], list[Tensor]],
    pieces: list[int],
    spec: AttentionSpec,
) -> Tensor:
    """Whole examples as a batch, padded on the right: causal attention never looks there."""
    longest, device = on_grid(max(pieces)), q.device
    lengths = torch.tensor(pieces, device=device)
    offsets = lengths.cumsum(0) - lengths
    column = torch.arange(longest, device=device)
    rows = (offsets[:, None] + column.minimum(lengths[:, None] - 1)).flatten()

    def batched(x: Tensor) -> Tensor:
        heads, width = x.shape[1], x.shape[-1]
        return x[0].index_select(1, rows).view(heads, len(pieces), longest, width).transpose(0, 1)

    keys, values = _joined(ahead[0], batched(k)), _joined(ahead[1], batched(v))
    out = attend(batched(q), keys, values, spec).transpose(1, 2).flatten(0, 1)
    real = (column < lengths[:, None]).flatten().nonzero().squeeze(1)
    return out.index_select(0, real)[None]
