"""What a micro-batch's backward pass needs, kept while its rows travel forward.

Kept are the inputs of every layer that trains or lies above one, keys and values, which later windows attend
to, and of what frozen linears and attention give as much as `Fates` say. The fused forward pass has no
graph: what is kept depends on the training rows alone.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.virtual import Virtual
from coserve.kernels import signs
from coserve.kernels.attention import Attended, AttentionSpec
from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.model.graph import GraphRows
from coserve.train.kv_gradients import KVGradAccumulator
from coserve.train.save_policy import Fate, Fates
from coserve.train.window import Pair, Past, Window, attend_window, attend_window_keeping

_NOTHING = Virtual("")


class Tape:
    """A micro-batch on its way: buffers over all its rows, filled window by window, layer by layer.

    tokens, labels [rows] (label -100 is none; a label belongs to the row that predicts it). Where `virtual`
    has prompts their rows come first, here once for all examples, as the first of `lengths`. What the first
    layer is given is embedded again when it is asked for; what the last one gives makes room, once its loss
    is known, for the gradient of rows that wait on their way back.
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
        self._owed = KVGradAccumulator(self._arena)
        self._given_grads: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def window(self, start: int, rows: int) -> Window:
        return Window.of(self.lengths, start, rows, self._virtual.prompt_count)

    @property
    def has_given(self) -> bool:
        """Whether keys and values are given before every example."""
        return bool(self._given)

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
        """product [window rows, out] of the frozen linear at `path`, or its sum with what is added there."""
        if path not in self.products:
            self.products[path] = self._room(product, self.rows, product.shape[-1])
        self.products[path][window.span] = product

    def product(self, path: str, window: Window) -> Tensor:
        """What was kept of the frozen linear at `path`, [window rows, out]."""
        return self.products[path][window.span]

    def keep_sign(self, path: str, window: Window, y: Tensor) -> None:
        """Where y [window rows, out] is positive, of the frozen linear at `path` with its bypasses."""
        bits = signs.pack(y)
        if path not in self._signs:
            self._signs[path] = self._room(bits, self.rows, bits.shape[-1])
        self._signs[path][window.span] = bits

    def signed(self, path: str, window: Window, like: Tensor) -> Tensor:
        """1 where `keep_sign` saw something positive, 0 elsewhere; [window rows, out] as `like` is."""
        return signs.unpack(self._signs[path][window.span], like.shape[-1], like.dtype)

    def keep_attended(self, layer: int, window: Window, attended: Attended) -> None:
        """out [1, window rows, heads, dv] and lse [1, window rows, heads]."""
        if layer not in self._attended:
            rooms = (self._room(x, self.rows, *x.shape[2:]) for x in attended)
            self._attended[layer] = Attended(*rooms)
        for room, given in zip(self._attended[layer], attended, strict=True):
            room[window.span] = given[0]

    def attended(self, layer: int, window: Window) -> Attended | None:
        """As `keep_attended` was given it, if it was."""
        if layer not in self._attended:
            return None
        return Attended(*(room[None, window.span] for room in self._attended[layer]))

    def keep_cache(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """k [groups, window rows, dk] and v: the way back may be cut into other windows than the way in."""
        for store, given in ((self._keys, k), (self._values, v)):
            if layer not in store:
                store[layer] = self._room(given, given.shape[0], self.rows, given.shape[-1])
            store[layer][:, window.span] = given

    def cache(self, layer: int, window: Window) -> Pair:
        """The window's own keys and values, [1, groups, rows, width]."""
        return self._cached(layer, window.span)

    def past(self, layer: int, window: Window) -> Past:
        """Keys and values that the window's rows may attend to beside what the layer itself makes of them."""
        source = self._source(layer)
        return Past(
            self._given[source] if self._given else None,
            self._cached(source, slice(window.before)) if window.before else None,
            self._cached(source, window.past_span) if window.past else None,
            self._cached(source, window.span) if source != layer else None,
        )

    def add_past_grads(self, layer: int, window: Window, grads: Sequence[Tensor]) -> None:
        """Gradients that this window owes to `Past.tensors`: to earlier rows' keys and values (FlexLLM 6.1,
        figure 10), and to those that are given; where the layer reads another's, to that one's. Accumulated
        in at least float32."""
        pairs = iter(zip(grads[::2], grads[1::2], strict=True))
        reads, layer = layer, self._source(layer)
        if self._given:
            self._owe_given(layer, next(pairs))
        if window.before:
            self._owed.add(layer, slice(0, window.before), next(pairs))
        if window.past:
            self._owed.add(layer, window.past_span, next(pairs))
        if reads != layer:
            self._owed.add(layer, window.span, next(pairs))

    def given_in_graph(self) -> list[Tensor]:
        """What `given_grads` are the gradients of, in the current graph."""
        return [tensor for pair in self._virtual.caches() for tensor in pair]

    def given_grads(self) -> list[Tensor]:
        """What all windows so far owe to the keys and values that are given: [groups, n, width], a layer's
        keys and its values after one another."""
        return [grads[layer] for layer in range(len(self._given)) for grads in self._given_grads]

    def _owe_given(self, layer: int, owed: Pair) -> None:
        """Adds [1, groups, n, width] to what the given keys and values are owed."""
        for store, given in zip(self._given_grads, owed, strict=True):
            if layer not in store:
                exact = torch.promote_types(given.dtype, torch.float32)
                store[layer] = self._arena.take(given.shape[1:], exact, given.device).zero_()
            store[layer] += given[0]

    def _source(self, layer: int) -> int:
        """Whose keys and values a layer attends to."""
        reads = self.base.caches[layer].reads
        return layer if reads is None else reads

    def _cached(self, layer: int, span: slice) -> Pair:
        return self._keys[layer][None, :, span], self._values[layer][None, :, span]

    def cache_grads(self, layer: int, window: Window, dtype: torch.dtype) -> Pair | None:
        """What later windows have added for this window's own keys and values, [1, groups, rows, width];
        asked once, on the window's way back through the layer."""
        return self._owed.collect(layer, window.span, dtype)

    def put_gradient(self, window: Window, gradient: Tensor) -> None:
        """Leaves a window between two layers, with the gradient [1, rows, width] it has there."""
        self._outputs[-1][window.span] = gradient[0]

    def picked_up(self, window: Window) -> Tensor:
        """The gradient [1, rows, width] of a window that was put down, whole or as part of a larger one."""
        return self._outputs[-1][None, window.span]

    def release(self) -> None:
        """Gives all memory back; the tape is of no use afterwards."""
        self._arena.give_back(self._kept())
        self._outputs.clear()
        self._owed.clear()
        self._attended.clear()
        for store in (self.products, self._signs, self._keys, self._values, *self._given_grads):
            store.clear()

    @property
    def nbytes(self) -> int:
        """Bytes kept for the backward pass (tokens, labels and what all layers are called with excluded)."""
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
        yield from self._owed.tensors()

    def _rooms(self, hidden: Tensor) -> list[Tensor]:
        """For every layer's output. Those below the lowest layer that goes back are passed on and no more: a
        row is in one place at a time."""
        passing = max(min(self.fates.lowest - 1, self.base.depth - 1), 0)
        taken = self.base.depth - passing + bool(passing)
        rooms = [self._room(hidden, self.rows, self.base.hidden_size) for _ in range(taken)]
        return rooms[:1] * max(passing - 1, 0) + rooms

    def _room(self, like: Tensor, *shape: int) -> Tensor:
        return self._arena.take(shape, like.dtype, like.device)


class KeptWindow:
    """A training window in a fused forward run: a `Part` that writes to its tape, and its own `Keeper`."""

    def __init__(self, tape: Tape, window: Window) -> None:
        self.tape = tape
        self.window = window
        self.count = window.rows

    @property
    def keeper(self) -> "KeptWindow | None":
        return self if self.tape.fates.keeps_products else None

    def keep(self, path: str, product: Tensor) -> None:
        if self.tape.fates.of(path) is Fate.KEPT:
            self.tape.keep_product(path, self.window, product)

    def keep_sum(self, path: str, y: Tensor) -> None:
        fate = self.tape.fates.of(path)
        if fate is Fate.SUM:
            self.tape.keep_product(path, self.window, y)
        elif fate is Fate.SIGN:
            self.tape.keep_sign(path, self.window, y)

    def keeps_attention(self, layer: int) -> bool:
        """Whether the tape is to have what the attention of a layer gives."""
        return self.tape.fates.of_attention(layer) is Fate.KEPT

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        past = self.tape.past(layer, self.window)
        if past.shared is None:
            self.tape.keep_cache(layer, self.window, k[0], v[0])
        else:
            k, v = past.shared
        if not self.keeps_attention(layer):
            return attend_window(q, k, v, past, self.window, spec)
        attended = attend_window_keeping(q, k, v, past, self.window, spec)
        self.tape.keep_attended(layer, self.window, attended)
        return attended.out
