"""What a micro-batch's backward pass needs, kept while its rows travel forward.

Kept are the inputs of every layer and its keys and values, which later windows attend to; with
`Keep.PRODUCTS` also what the frozen linears gave, so that going back computes no dear thing twice. The
fused forward pass has no graph: what is kept depends on the training rows alone.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.core.grid import on_grid
from coserve.kernels.attention import AttentionSpec, attend
from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.model.graph import GraphRows


class Keep(Enum):
    """INPUTS keeps layer inputs and recomputes the rest; PRODUCTS keeps the frozen linears' outputs too."""

    INPUTS = "inputs"
    PRODUCTS = "products"


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


@dataclass(frozen=True, slots=True)
class Virtual:
    """What stands before every example of a micro-batch: first `given`, keys [groups, n, dk] and values
    [groups, n, dv] by layer, then the first `prompt` rows of the micro-batch."""

    given: tuple[Pair, ...] = ()
    prompt: int = 0

    @property
    def given_count(self) -> int:
        return self.given[0][0].shape[1] if self.given else 0


class Tape:
    """A micro-batch on its way: buffers over all its rows, filled window by window, layer by layer.

    tokens, labels [rows] (label -100 is none; a label belongs to the row that predicts it). What the first
    layer is given is embedded again when it is asked for; what the last one gives makes room, once its loss
    is known, for the gradient of rows that wait on their way back.
    """

    def __init__(
        self,
        base: Base,
        lengths: tuple[int, ...],
        tokens: Tensor,
        labels: Tensor,
        keep: Keep,
        arena: Arena | None = None,
    ) -> None:
        self.base = base
        self._arena = arena if arena is not None else Arena()
        self.lengths = lengths
        self.labels = labels
        self.keep = keep
        self.rows = len(tokens)
        self._tokens = tokens
        self._positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        hidden, self._calls = base.prologue(tokens, self._positions)
        self._outputs = [self._room(hidden, self.rows, base.hidden_size) for _ in range(base.depth)]
        self.products: dict[str, Tensor] = {}
        self.loss: Tensor = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._key_grads: dict[int, Tensor] = {}
        self._value_grads: dict[int, Tensor] = {}

    def window(self, start: int, rows: int) -> Window:
        return Window.of(self.lengths, start, rows)

    def calls_for(self, window: Window) -> LayerCalls:
        """The layers' arguments for the rows of a window."""
        return self.base.arguments.narrow(self._calls, window.start, window.rows)

    def input(self, layer: int, window: Window, bypasses: Bypasses) -> Tensor:
        """What layer `layer` is given for the window's rows, [1, rows, width]; the adapter's `bypasses` have
        a say in what the first one is given."""
        if layer > 0:
            return self._outputs[layer - 1][None, window.span]
        with torch.no_grad():
            return self.embed(window, bypasses)

    def embed(self, window: Window, bypasses: Bypasses) -> Tensor:
        """The embeddings [1, rows, width] of the window's rows, in the current graph if there is one."""
        rows = GraphRows(bypasses) if bypasses.touches(self.base.early_sites) else None
        return self.base.embed(self._tokens[window.span], self._positions[window.span], rows)

    def keep_output(self, layer: int, window: Window, hidden: Tensor) -> None:
        """hidden [rows, width] is what layer `layer` gave."""
        self._outputs[layer][window.span] = hidden

    def output(self, window: Window) -> Tensor:
        """What the last layer gave, [1, rows, width], until the window's gradient takes its place."""
        return self._outputs[-1][None, window.span]

    def keep_product(self, path: str, window: Window, product: Tensor) -> None:
        """product [window rows, out] of the frozen linear at `path`."""
        if path not in self.products:
            self.products[path] = self._room(product, self.rows, product.shape[-1])
        self.products[path][window.span] = product

    def product(self, path: str, window: Window) -> Tensor | None:
        return self.products[path][window.span] if path in self.products else None

    def keep_cache(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """k [groups, window rows, dk] and v: the way back may be cut into other windows than the way in."""
        for store, given in ((self._keys, k), (self._values, v)):
            if layer not in store:
                store[layer] = self._room(given, given.shape[0], self.rows, given.shape[-1])
            store[layer][:, window.span] = given

    def past_cache(self, layer: int, window: Window) -> tuple[Tensor, Tensor] | None:
        """Keys and values [1, groups, past, width] of the rows before the window in its first example."""
        if not window.past:
            return None
        return self._keys[layer][None, :, window.past_span], self._values[layer][None, :, window.past_span]

    def add_cache_grads(self, layer: int, window: Window, dk: Tensor, dv: Tensor) -> None:
        """Gradients [1, groups, past, width] that this window owes to earlier rows' keys and values
        (FlexLLM 6.1, figure 10). Accumulated in at least float32."""
        for store, given in ((self._key_grads, dk), (self._value_grads, dv)):
            if layer not in store:
                exact = torch.promote_types(given.dtype, torch.float32)
                shape = (given.shape[1], self.rows, given.shape[-1])
                store[layer] = self._arena.take(shape, exact, given.device).zero_()
            store[layer][:, window.past_span] += given[0]

    def cache_grads(self, layer: int, window: Window, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """What later windows have added for this window's own keys and values, [1, groups, rows, width]."""
        if layer not in self._key_grads:
            return None
        return (
            self._key_grads[layer][None, :, window.span].to(dtype),
            self._value_grads[layer][None, :, window.span].to(dtype),
        )

    def put_down(self, window: Window, gradient: Tensor) -> None:
        """Leaves a window between two layers, with the gradient [1, rows, width] it has there."""
        self._outputs[-1][window.span] = gradient[0]

    def picked_up(self, window: Window) -> Tensor:
        """The gradient [1, rows, width] of a window that was put down, whole or as part of a larger one."""
        return self._outputs[-1][None, window.span]

    def release(self) -> None:
        """Gives all memory back; the tape is of no use afterwards."""
        self._arena.give_back(self._kept())
        self._outputs.clear()
        for store in self._stores():
            store.clear()

    @property
    def nbytes(self) -> int:
        """Bytes kept for the backward pass (tokens, labels and what all layers are called with excluded)."""
        return sum(t.nbytes for t in self._kept())

    def _kept(self) -> list[Tensor]:
        return [*self._outputs, *(t for store in self._stores() for t in store.values())]

    def _stores(self) -> tuple[dict[Any, Tensor], ...]:
        return self.products, self._keys, self._values, self._key_grads, self._value_grads

    def _room(self, like: Tensor, *shape: int) -> Tensor:
        return self._arena.take(shape, like.dtype, like.device)


class KeptWindow:
    """A training window in a fused forward run: a `Part` that writes to its tape."""

    def __init__(self, tape: Tape, window: Window) -> None:
        self.tape = tape
        self.window = window
        self.count = window.rows
        self.is_kept = tape.keep is Keep.PRODUCTS

    def keep(self, path: str, product: Tensor) -> None:
        self.tape.keep_product(path, self.window, product)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.tape.keep_cache(layer, self.window, k[0], v[0])
        return attend_window(q, k, v, self.tape.past_cache(layer, self.window), self.window, spec)


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None, window: Window, spec: AttentionSpec
) -> Tensor:
    """Attention of a window's rows, each within its own example; differentiable.

    q [1, heads, rows, dk], k [1, groups, rows, dk], v [1, groups, rows, dv], past keys and values
    [1, groups, past, width] of the first piece; returns [1, rows, heads, dv].
    """
    outputs = []
    pieces = list(window.pieces)
    start = 0
    if past is not None:
        start = pieces.pop(0)
        first = slice(0, start)
        keys = torch.cat([past[0], k[:, :, first]], dim=2)
        values = torch.cat([past[1], v[:, :, first]], dim=2)
        outputs.append(attend(q[:, :, first], keys, values, spec).transpose(1, 2))
    if start:  # a slice of everything would cost a zeroed gradient and a copy on the way back
        q, k, v = q[:, :, start:], k[:, :, start:], v[:, :, start:]
    if len(pieces) == 1:
        outputs.append(attend(q, k, v, spec).transpose(1, 2))
    elif pieces:
        outputs.append(_attend_side_by_side(q, k, v, pieces, spec))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_side_by_side(q: Tensor, k: Tensor, v: Tensor, pieces: list[int], spec: AttentionSpec) -> Tensor:
    """Whole examples as a batch, padded on the right: causal attention never looks there."""
    longest, device = on_grid(max(pieces)), q.device
    lengths = torch.tensor(pieces, device=device)
    offsets = lengths.cumsum(0) - lengths
    column = torch.arange(longest, device=device)
    rows = (offsets[:, None] + column.minimum(lengths[:, None] - 1)).flatten()

    def batched(x: Tensor) -> Tensor:
        heads, width = x.shape[1], x.shape[-1]
        return x[0].index_select(1, rows).view(heads, len(pieces), longest, width).transpose(0, 1)

    out = attend(batched(q), batched(k), batched(v), spec).transpose(1, 2).flatten(0, 1)
    real = (column < lengths[:, None]).flatten().nonzero().squeeze(1)
    return out.index_select(0, real)[None]
