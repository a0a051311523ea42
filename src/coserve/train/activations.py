"""The activations that a micro-batch's backward needs, stored while its rows pass forward.

Stored are the inputs of every layer that trains or lies above one, keys and values, to which later windows
attend, and the outputs of frozen linears and attention that `Fates` keep. The fused forward has no graph:
what is stored depends on the training rows alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.virtual import Virtual
from coserve.kernels import signs
from coserve.kernels.attention import Attended
from coserve.memory.arena import Arena, Lease
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.model.graph import GraphRows
from coserve.train.kv import MicroBatchKV
from coserve.train.row_buffers import RowBuffers
from coserve.train.save_policy import Fate, Fates
from coserve.train.states import MicroBatchStates
from coserve.train.window import Window

_NOTHING = Virtual("")


class ActivationStore:
    """Activations of all rows of a micro-batch, filled window by window, layer by layer.

    `loss` is summed over the rows that have passed the tail, and `hits` counts those whose label is the
    likeliest token, where the tail counts them. `hidden` has the layers' outputs, `saved` outputs kept from
    inside layers, `kv` keys and values, `states` those of recurrent layers. tokens, labels [rows] (label -100
    is none; a label belongs to the row that predicts it). Where `virtual` has prompts their rows come first,
    once for all examples, as the first of `lengths`. The first layer's input is embedded again when it is
    needed.
    """

    def __init__(
        self,
        base: Base,
        lengths: tuple[int, ...],
        tokens: Tensor,
        labels: Tensor,
        fates: Fates,
        arena: Arena | None = None,
        virtual: Virtual = _NOTHING,
    ) -> None:
        self.base, self.lengths, self.labels = base, lengths, labels
        self.rows = len(tokens)
        self.prompt = virtual.prompt_count  # rows at the beginning, before all examples
        self._tokens = tokens
        firsts = [virtual.given_count, *[virtual.count] * (len(lengths) - 1)]  # a prompt counts as an example
        self._positions = torch.cat(
            [
                torch.arange(first, first + n, device=tokens.device)
                for n, first in zip(lengths, firsts, strict=True)
            ]
        )
        embedded, self._calls = base.prologue(tokens, self._positions)
        self._lease = Lease(arena if arena is not None else Arena())
        self.hidden = HiddenStates(embedded, base.depth, fates.lowest, self._lease, base.chain.span)
        self.saved = SavedOutputs(fates, self.rows, self._lease)
        self.kv = MicroBatchKV([cache.reads for cache in base.caches], self.rows, virtual, self._lease)
        self.states = MicroBatchStates(lengths, self._lease)
        self.loss: Tensor = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self.hits: Tensor | None = None

    def window(self, start: int, rows: int) -> Window:
        """Rows [start, start + rows) of the micro-batch."""
        return Window.of(self.lengths, start, rows, self.prompt)

    def calls_for(self, window: Window) -> LayerCalls:
        """The layers' arguments for a window's rows."""
        return self.base.arguments.narrow(self._calls, window.start, window.rows)

    def input(self, layer: int, window: Window, bypasses: Bypasses) -> Tensor:
        """The input of layer `layer` for the window's rows, [1, rows, width]. That of the first layer is the
        embedding with its `bypasses`."""
        if layer > 0:
            return self.hidden.output(layer - 1, window)
        with torch.no_grad():
            return self.embed(window, bypasses)

    def embed(self, window: Window, bypasses: Bypasses) -> Tensor:
        """The embeddings [1, rows, width] of the window's rows, in the current graph if there is one."""
        touched = bypasses.touches(self.base.early_sites)
        rows = GraphRows([bypasses], [window.rows]) if touched else None
        return self.base.embed(self._tokens[window.span], self._positions[window.span], rows)

    def release(self) -> None:
        """Returns all memory to the arena, after which nothing can be read."""
        self._lease.release()
        del self.hidden, self.saved, self.kv, self.states

    @property
    def nbytes(self) -> int:
        """Bytes stored for backward, without tokens, labels and the layers' arguments."""
        return self._lease.nbytes


class HiddenStates:
    """Outputs of the layers, [rows, width] each, and gradients that wait between two steps.

    Layers below `lowest` have no backward and share one buffer, which holds only a row's newest output. Once
    the loss is known, the buffer of the last layer's output holds the gradients of rows that rest between two
    layers on their way back. Of the layers of other stages those below share a buffer too, and those above
    have that of the last one here.
    """

    def __init__(self, like: Tensor, depth: int, lowest: int, lease: Lease, span: range) -> None:
        """`like` [1, rows, width] is the first layer's input; `span` are the layers that are here."""
        passing = max(min(max(lowest, span.start) - 1, span.stop - 1), 0)
        taken = span.stop - passing + bool(passing)
        buffers = [lease.take(like.shape[1:], like.dtype, like.device) for _ in range(taken)]
        self._outputs = buffers[:1] * max(passing - 1, 0) + buffers + buffers[-1:] * (depth - span.stop)

    def save(self, layer: int, window: Window, hidden: Tensor) -> None:
        """Stores hidden [window rows, width], the output of layer `layer`."""
        self._outputs[layer][window.span] = hidden

    def output(self, layer: int, window: Window) -> Tensor:
        """The output of layer `layer`, [1, window rows, width]."""
        return self._outputs[layer][None, window.span]

    def last(self, window: Window) -> Tensor:
        """The last layer's output, [1, window rows, width], until the window's gradient takes its place."""
        return self.output(-1, window)

    def save_gradient(self, window: Window, gradient: Tensor) -> None:
        """Stores the gradient [1, window rows, width] of a window resting between two layers."""
        self.save(-1, window, gradient[0])

    def gradient(self, window: Window) -> Tensor:
        """The gradient [1, window rows, width] of a resting window, whole or part of a larger one."""
        return self.output(-1, window)


class SavedOutputs:
    """Kept outputs of frozen linears, by path, and of attention, by layer, as `fates` say."""

    def __init__(self, fates: Fates, rows: int, lease: Lease) -> None:
        self.fates = fates
        self._linears: RowBuffers[str] = RowBuffers(rows, lease)
        self._attended: tuple[RowBuffers[int], RowBuffers[int]] = (
            RowBuffers(rows, lease),
            RowBuffers(rows, lease),
        )

    def save_product(self, path: str, window: Window, product: Tensor) -> None:
        """Stores product [window rows, out] of the frozen linear at `path`, where its fate is KEPT."""
        if self.fates.of(path) is Fate.KEPT:
            self._linears.write(path, window.span, product)

    def save_sum(self, path: str, window: Window, y: Tensor) -> None:
        """Stores y [window rows, out] of the frozen linear at `path` with its bypasses, where its fate is
        SUM, or only where y is positive, where it is SIGN."""
        fate = self.fates.of(path)
        if fate is Fate.SUM:
            self._linears.write(path, window.span, y)
        elif fate is Fate.SIGN:
            self._linears.write(path, window.span, signs.pack(y))

    def save_attended(self, layer: int, window: Window, attended: Attended) -> None:
        """Stores out [1, window rows, heads, dv] and lse [1, window rows, heads] of a layer's attention."""
        for buffers, x in zip(self._attended, attended, strict=True):
            buffers.write(layer, window.span, x[0])

    def copy_to(
        self, other: "SavedOutputs", layer: int, paths: Sequence[str], rows: slice, there: slice
    ) -> None:
        """Copies what is kept of a layer, with its frozen linears at `paths`, of `rows`, to rows `there` of
        another store."""
        for path in paths:
            if path in self._linears:
                other._linears.write(path, there, self._linears.read(path, rows))
        for own, others in zip(self._attended, other._attended, strict=True):
            if layer in own:
                others.write(layer, there, own.read(layer, rows))

    def product(self, path: str, window: Window) -> Tensor:
        """The product or sum [window rows, out] of a linear whose fate is KEPT or SUM."""
        return self._linears.read(path, window.span)

    def sign(self, path: str, window: Window, like: Tensor) -> Tensor:
        """1 where y of a linear whose fate is SIGN was positive, 0 elsewhere; [window rows, out] as
        `like` is."""
        return signs.unpack(self._linears.read(path, window.span), like.shape[-1], like.dtype)

    def attended(self, layer: int, window: Window) -> Attended | None:
        """The output stored by `save_attended`, or None."""
        if layer not in self._attended[0]:
            return None
        return Attended(*(buffers.read(layer, window.span)[None] for buffers in self._attended))
