"""The activations that a micro-batch's backward needs, stored while its rows pass forward.

A tape stores the inputs of every layer that trains or lies above one, keys and values, which later windows
attend to, and as much of the outputs of frozen linears and attention as `Fates` say. The fused forward has no
graph: what is stored depends on the training rows alone.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.virtual import Virtual
from coserve.kernels import signs
from coserve.kernels.attention import Attended
from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.model.graph import GraphRows
from coserve.train.kv_gradients import KVGradAccumulator
from coserve.train.save_policy import Fates
from coserve.train.window import KV, PastKV, Window

_NOTHING = Virtual("")


class Tape:
    """Buffers over all rows of a micro-batch, filled window by window, layer by layer.

    tokens, labels [rows] (label -100 is none; a label belongs to the row that predicts it). Where `virtual`
    has prompts their rows come first, once for all examples, as the first of `lengths`. The first layer's
    input is embedded again when it is needed. The buffer of the last layer's output holds, once the loss is
    known, the gradient of rows that rest between two layers on their way back.
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
        self.base = base
        self._arena = arena if arena is not None else Arena()
        self.lengths = lengths
        self.labels = labels
        self.fates = fates
        self.rows = len(tokens)
        self._tokens = tokens
        self._virtual = virtual
        with torch.no_grad():
            self._given = [(k[None], v[None]) for k, v in virtual.caches()]
        self._positions = torch.cat(
            [
                torch.arange(first, first + n, device=tokens.device)
                for n, first in zip(lengths, self._firsts(), strict=True)
            ]
        )
        hidden, self._calls = base.prologue(tokens, self._positions)
        self._outputs = self._rooms(hidden)
        self.products: dict[str, Tensor] = {}
        self._signs: dict[str, Tensor] = {}
        self._attended: dict[int, Attended] = {}
        self.loss: Tensor = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._kv_grads = KVGradAccumulator(self._arena)
        self._given_grads: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def window(self, start: int, rows: int) -> Window:
        """Rows [start, start + rows) of the micro-batch."""
        return Window.of(self.lengths, start, rows, self._virtual.prompt_count)

    @property
    def has_given(self) -> bool:
        """Tells whether virtual keys and values stand before every example."""
        return bool(self._given)

    def calls_for(self, window: Window) -> LayerCalls:
        """The layers' arguments for the rows of a window."""
        return self.base.arguments.narrow(self._calls, window.start, window.rows)

    def input(self, layer: int, window: Window, bypasses: Bypasses) -> Tensor:
        """The input of layer `layer` for the window's rows, [1, rows, width]. That of the first layer is the
        embedding with its `bypasses`."""
        if layer > 0:
            return self._outputs[layer - 1][None, window.span]
        with torch.no_grad():
            return self.embed(window, bypasses)

    def embed(self, window: Window, bypasses: Bypasses) -> Tensor:
        """The embeddings [1, rows, width] of the window's rows, in the current graph if there is one."""
        touched = bypasses.touches(self.base.early_sites)
        rows = GraphRows([bypasses], [window.rows]) if touched else None
        return self.base.embed(self._tokens[window.span], self._positions[window.span], rows)

    def keep_output(self, layer: int, window: Window, hidden: Tensor) -> None:
        """Stores hidden [rows, width], the output of layer `layer`."""
        self._outputs[layer][window.span] = hidden

    def output(self, window: Window) -> Tensor:
        """The last layer's output, [1, rows, width], until the window's gradient takes its place."""
        return self._outputs[-1][None, window.span]

    def keep_product(self, path: str, window: Window, product: Tensor) -> None:
        """Stores product [window rows, out] of the frozen linear at `path`, or its sum with the bypasses
        there."""
        if path not in self.products:
            self.products[path] = self._room(product, self.rows, product.shape[-1])
        self.products[path][window.span] = product

    def product(self, path: str, window: Window) -> Tensor:
        """The product that `keep_product` stored, [window rows, out]."""
        return self.products[path][window.span]

    def keep_sign(self, path: str, window: Window, y: Tensor) -> None:
        """Stores where y [window rows, out], of the frozen linear at `path` with its bypasses, is
        positive."""
        bits = signs.pack(y)
        if path not in self._signs:
            self._signs[path] = self._room(bits, self.rows, bits.shape[-1])
        self._signs[path][window.span] = bits

    def signed(self, path: str, window: Window, like: Tensor) -> Tensor:
        """1 where `keep_sign` found y positive, 0 elsewhere; [window rows, out] as `like` is."""
        return signs.unpack(self._signs[path][window.span], like.shape[-1], like.dtype)

    def keep_attended(self, layer: int, window: Window, attended: Attended) -> None:
        """Stores out [1, window rows, heads, dv] and lse [1, window rows, heads] of a layer's attention."""
        if layer not in self._attended:
            rooms = (self._room(x, self.rows, *x.shape[2:]) for x in attended)
            self._attended[layer] = Attended(*rooms)
        for room, given in zip(self._attended[layer], attended, strict=True):
            room[window.span] = given[0]

    def attended(self, layer: int, window: Window) -> Attended | None:
        """The output that `keep_attended` stored; None if nothing."""
        if layer not in self._attended:
            return None
        return Attended(*(room[None, window.span] for room in self._attended[layer]))

    def keep_cache(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """Stores k [groups, window rows, dk] and v. Backward may be cut into other windows than forward."""
        for store, given in ((self._keys, k), (self._values, v)):
            if layer not in store:
                store[layer] = self._room(given, given.shape[0], self.rows, given.shape[-1])
            store[layer][:, window.span] = given

    def cache(self, layer: int, window: Window) -> KV:
        """The window's own keys and values, [1, groups, rows, width]."""
        return self._cached(layer, window.span)

    def past(self, layer: int, window: Window) -> PastKV:
        """Keys and values that the window's rows may attend to beside those that the layer makes of them."""
        source = self._source(layer)
        return PastKV(
            self._given[source] if self._given else None,
            self._cached(source, slice(window.before)) if window.before else None,
            self._cached(source, window.past_span) if window.past else None,
            self._cached(source, window.span) if source != layer else None,
        )

    def add_past_grads(self, layer: int, window: Window, grads: Sequence[Tensor]) -> None:
        """Adds this window's gradients of `PastKV.tensors` to those of earlier rows' keys and values (FlexLLM
        6.1, figure 10) and of virtual ones; where the layer reads another layer's, to that layer's. Sums are
        in at least float32."""
        pairs = iter(zip(grads[::2], grads[1::2], strict=True))
        reads, layer = layer, self._source(layer)
        if self._given:
            self._add_given_grads(layer, next(pairs))
        if window.before:
            self._kv_grads.add(layer, slice(0, window.before), next(pairs))
        if window.past:
            self._kv_grads.add(layer, window.past_span, next(pairs))
        if reads != layer:
            self._kv_grads.add(layer, window.span, next(pairs))

    def given_in_graph(self) -> list[Tensor]:
        """The virtual keys and values in the current graph, in the order of `given_grads`."""
        return [tensor for pair in self._virtual.caches() for tensor in pair]

    def given_grads(self) -> list[Tensor]:
        """Gradients of virtual keys and values from all windows so far, [groups, n, width]: of each layer the
        keys', then the values'."""
        return [grads[layer] for layer in range(len(self._given)) for grads in self._given_grads]

    def _add_given_grads(self, layer: int, grads: KV) -> None:
        """Adds gradients [1, groups, n, width] to those of a layer's virtual keys and values."""
        for store, grad in zip(self._given_grads, grads, strict=True):
            if layer not in store:
                exact = torch.promote_types(grad.dtype, torch.float32)
                store[layer] = self._arena.take(grad.shape[1:], exact, grad.device).zero_()
            store[layer] += grad[0]

    def _source(self, layer: int) -> int:
        """The layer whose keys and values `layer` attends to."""
        reads = self.base.caches[layer].reads
        return layer if reads is None else reads

    def _cached(self, layer: int, span: slice) -> KV:
        return self._keys[layer][None, :, span], self._values[layer][None, :, span]

    def collect_kv_grads(self, layer: int, window: Window, dtype: torch.dtype) -> KV | None:
        """Gradients that later windows have added for this window's own keys and values, [1, groups, rows,
        width]; None if none. To be called once, when the window goes back through the layer."""
        return self._kv_grads.collect(layer, window.span, dtype)

    def put_gradient(self, window: Window, gradient: Tensor) -> None:
        """Stores the gradient [1, rows, width] of a window that rests between two layers."""
        self._outputs[-1][window.span] = gradient[0]

    def gradient(self, window: Window) -> Tensor:
        """The gradient [1, rows, width] of a window that rests, whole or as part of a larger one."""
        return self._outputs[-1][None, window.span]

    def release(self) -> None:
        """Returns all memory to the arena; the tape cannot be used afterwards."""
        self._arena.give_back(self._kept())
        self._outputs.clear()
        self._kv_grads.clear()
        self._attended.clear()
        for store in (self.products, self._signs, self._keys, self._values, *self._given_grads):
            store.clear()

    @property
    def nbytes(self) -> int:
        """Bytes stored for backward, without tokens, labels and the layers' arguments."""
        return sum(t.nbytes for t in self._kept())

    def _firsts(self) -> list[int]:
        """Position of each example's first row; the prompt's rows count as an example."""
        given, count = self._virtual.given_count, self._virtual.count
        return [given, *[count] * (len(self.lengths) - 1)]

    def _kept(self) -> list[Tensor]:
        return list({id(tensor): tensor for tensor in self._all()}.values())

    def _all(self) -> Iterator[Tensor]:
        yield from self._outputs
        for store in (self.products, self._signs, self._keys, self._values, *self._given_grads):
            yield from store.values()
        for attended in self._attended.values():
            yield from attended
        yield from self._kv_grads.tensors()

    def _rooms(self, hidden: Tensor) -> list[Tensor]:
        """Buffers of every layer's output. Layers below the lowest that goes back share one: of a row they
        hold the newest output only."""
        passing = max(min(self.fates.lowest - 1, self.base.depth - 1), 0)
        taken = self.base.depth - passing + bool(passing)
        rooms = [self._room(hidden, self.rows, self.base.hidden_size) for _ in range(taken)]
        return rooms[:1] * max(passing - 1, 0) + rooms

    def _room(self, like: Tensor, *shape: int) -> Tensor:
        return self._arena.take(shape, like.dtype, like.device)
