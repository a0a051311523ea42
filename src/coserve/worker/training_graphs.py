"""Windows of training as graphs: a layer's kernels, forward or back, launched as one.

From Python a layer's kernels take longer to launch than an H200 computes a window of 512 rows. There is a
graph for each layer and direction, for buckets of rows and of rows before them, and for adapters of the same
low-rank shapes; what it reads and writes is in a `GraphStore`. Windows of other methods, with dropout or
virtual tokens, and of layers that wait for the device are launched kernel by kernel.

A graph is captured in a step without answers, once a few windows have asked for it. As for passes of answers
`Record` is the seam: the plain twin `rerun` computes anew in each replay.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from coserve.adapters.activation import ActiveBypasses
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import LoRABypass, is_plain
from coserve.core.row_buckets import graph_rows
from coserve.memory.exhausted import is_out_of_memory
from coserve.model.base import Base
from coserve.train.backward import BackwardWindow, layer_gradients
from coserve.train.graph_store import GraphedLayer, GraphStore
from coserve.train.window_group import ForwardWindow
from coserve.worker.cuda_graphs import Record, Run, graph_nbytes

_log = logging.getLogger(__name__)

PAST: Final = (0, 512, 1024, 2048)  # rows of its first example before it
WORTH: Final = 2  # windows that ask for a graph before it is captured, which takes as long as two launched
_MOST: Final = 1024  # graphs; beyond them the one that was replayed longest ago goes
_STORES: Final = 8  # of adapters' shapes and buckets

Forward = Callable[[Sequence[ForwardWindow], range], object]  # takes windows through layers
AnyWindow = ForwardWindow | BackwardWindow


class _StoreKind(NamedTuple):
    """Key of a store: buckets of rows, and of a layer its linears and cache, its bypasses by name,
    rank, scale and type, and what is kept of it."""

    rows: int
    past: int
    layer: tuple[object, ...]
    bypasses: tuple[object, ...]
    kept: tuple[object, ...]


class _WindowGraph(NamedTuple):
    """Key of a graph: its store, layer and direction. On the way back `goes_on` tells whether a
    layer's input needs a gradient, and `is_owed` whether its keys and values have some from later windows."""

    store: _StoreKind
    layer: int
    is_back: bool
    goes_on: bool = False
    is_owed: bool = False


class TrainingGraphs:
    """The graphs of a device's training, by what they depend on."""

    def __init__(self, base: Base, forward: Forward, record: Record) -> None:
        """`forward` takes windows through layers."""
        self._base, self._forward, self._record = base, forward, record
        self._paths = [[path for path in base.linears if block.holds(path)] for block in base.chain]
        blocks = zip(base.chain, self._paths, strict=True)
        self._names = {path: path.removeprefix(f"{own.path}.") for own, paths in blocks for path in paths}
        self._layer_of = {path: site.stage for path, site in base.sites.items()}
        self._kinds = [self._kind_of(layer) for layer in range(base.depth)]
        self._graphs: dict[_WindowGraph, Run] = {}  # in the order of their last replays
        self._stores: dict[_StoreKind, GraphStore] = {}  # the same
        self._asked: Counter[_WindowGraph] = Counter()  # windows without one
        self._is_refused = False  # whether the layers' work cannot be captured
        self._known: tuple[Bypasses, Mapping[int, GraphedLayer]] | None = None  # of the last window's adapter
        self.may_capture = False  # no answers wait meanwhile
        self._limit: int | None = None  # of the stores' bytes
        self._too_large: set[_StoreKind] = set()  # stores that are beyond the limit alone

    @property
    def count(self) -> int:
        """Number of graphs that are there."""
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Bytes that graphs and stores hold on the device."""
        return graph_nbytes(self._record) + self.store_nbytes

    @property
    def store_nbytes(self) -> int:
        """Bytes of stores, which `set_limit` limits."""
        return sum(store.nbytes for store in self._stores.values())

    def set_limit(self, limit: int) -> None:
        """Changes the most bytes of stores. Those beyond it go at once, with their graphs, the one used
        longest ago first."""
        self._limit = limit
        self._too_large.clear()
        self._trim()

    def forward(self, window: ForwardWindow, layers: range) -> bool:
        """Takes a window through those of `layers` that it passes. False, and nothing is done, where graphs
        do not hold it."""
        passed = range(max(layers.start, window.layers.start), min(layers.stop, window.layers.stop))
        return self._run(window, passed, window.store.kv.virtual)

    def backward(self, window: BackwardWindow, layers: range) -> bool:
        """The same on the way back."""
        passed = range(min(layers.start, window.layers.start), max(layers.stop, window.layers.stop), -1)
        return self._run(window, passed, window.backward.store.kv.virtual)

    def _run(self, window: AnyWindow, layers: range, virtual: object) -> bool:
        own = window.window
        is_small = graph_rows(own.rows) is not None and own.past <= PAST[-1]
        if self._is_refused or virtual or own.prompt or own.before or not is_small:
            return False
        there = self._graphed(window.bypasses)
        kinds = [self._kind(window, there[layer]) for layer in layers if layer in there]
        if len(kinds) < len(layers) or None in kinds:
            return False
        if self._too_large and any(kind is not None and kind.store in self._too_large for kind in kinds):
            return False
        asked = [kind for kind in kinds if kind is not None and kind not in self._graphs]
        if asked and not self._is_worth(asked):
            return False
        for kind in kinds:
            assert kind is not None
            self._base.chain.on_layer()
            self._pass(kind, window, there[kind.layer])
        if asked and self._limit is not None and self.store_nbytes > self._limit:
            if len(self._stores) == 1:
                self._too_large.update(self._stores)
            self._trim()
        return True

    def _is_worth(self, kinds: Sequence[_WindowGraph]) -> bool:
        """Notes that a window has asked for graphs that are not there, and tells whether they are to be."""
        if len(self._asked) > _MOST:
            self._asked.clear()
        self._asked.update(kinds)
        return self.may_capture and all(self._asked[kind] >= WORTH for kind in kinds)

    def _pass(self, kind: _WindowGraph, window: AnyWindow, layer: GraphedLayer) -> None:
        """Takes a window through a layer."""
        store = self._store(kind.store, layer)
        store.load(layer, window)
        graph = self._graphs.pop(kind, None)
        if graph is None:
            graph = self._captured(kind, store, layer)
        if graph is None:
            self._launch(window, layer.number)
            return
        self._graphs[kind] = graph
        graph()
        if isinstance(window, ForwardWindow):
            store.put_forward(layer, window)
        else:
            store.put_back(layer, window, kind.goes_on)

    def _launch(self, window: AnyWindow, layer: int) -> None:
        """Takes a window through a layer kernel by kernel."""
        if isinstance(window, ForwardWindow):
            self._forward([window], range(layer, layer + 1))
        else:
            window.accumulate(layer, layer_gradients(layer, [window])[0])

    def _captured(self, kind: _WindowGraph, store: GraphStore, layer: GraphedLayer) -> Run | None:
        """The graph of a layer; None where there can be none."""
        if len(self._graphs) >= _MOST:
            del self._graphs[next(iter(self._graphs))]

        def forward() -> torch.Tensor:
            self._forward([store.forward_window(layer)], range(layer.number, layer.number + 1))
            return store.leaving

        def back() -> torch.Tensor:
            return store.keep(layer_gradients(layer.number, [store.backward_window(layer, kind.goes_on)])[0])

        try:
            return self._record(back if kind.is_back else forward)
        except RuntimeError as error:
            if is_out_of_memory(error):  # which may pass
                self._asked[kind] = 0
            else:
                self._is_refused = True
            _log.warning("training is launched kernel by kernel: %s", str(error).partition("\n")[0])
            return None

    def _store(self, kind: _StoreKind, layer: GraphedLayer) -> GraphStore:
        store = self._stores.pop(kind, None)
        if store is None:
            while len(self._stores) >= _STORES:
                self._drop_oldest()
            store = GraphStore(self._base, kind.rows, kind.past, layer, self._names)
        self._stores[kind] = store
        return store

    def _trim(self) -> None:
        while self._limit is not None and self._stores and self.store_nbytes > self._limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drops the store that was used longest ago, and its graphs."""
        gone = next(iter(self._stores))
        del self._stores[gone]
        self._graphs = {one: graph for one, graph in self._graphs.items() if one.store != gone}

    def _kind(self, window: AnyWindow, layer: GraphedLayer) -> _WindowGraph | None:
        """The kind of graph that takes a window through a layer; None where there is none."""
        own, number = window.window, layer.number
        saved = (window.store if isinstance(window, ForwardWindow) else window.backward.store).saved
        fates = saved.fates
        kept = (*(fates.of(path) for path in layer.paths), fates.of_attention(number))
        bypasses = tuple(
            (self._names[path], len(one.a), one.scale, one.a.dtype) for path, one in layer.bypasses.items()
        )
        rows, past = graph_rows(own.rows) or own.rows, PAST[bisect_left(PAST, own.past)]
        store = _StoreKind(rows, past, self._kinds[number], bypasses, kept)
        if isinstance(window, ForwardWindow):
            return _WindowGraph(store, number, is_back=False)
        matrices, goes_on = {id(matrix) for matrix in layer.matrices}, window.needs_input_grad(number)
        if (goes_on and not number) or any(
            id(leaf) not in matrices for leaf in window.backward.leaves(number)
        ):
            return None
        return _WindowGraph(store, number, True, goes_on, window.backward.store.kv.has_grads(number, own))

    def _graphed(self, bypasses: Bypasses) -> Mapping[int, GraphedLayer]:
        """The layers in which all of an adapter's bypasses are low-rank ones beside linears, by number; none
        of an adapter that acts on some rows alone."""
        if isinstance(bypasses, ActiveBypasses):
            return {}
        if self._known is None or self._known[0] is not bypasses:
            others = {self._layer_of.get(path) for path in bypasses.inputs}
            own: dict[int, dict[str, LoRABypass]] = {layer: {} for layer in range(self._base.depth)}
            for path, bypass in bypasses.outputs.items():
                if path in self._names and is_plain(bypass):
                    own[self._layer_of[path]][path] = bypass
                else:
                    others.add(self._layer_of.get(path))
            caches = self._base.caches
            layers = {
                number: GraphedLayer(number, self._paths[number], caches[number], here)
                for number, here in own.items()
                if number not in others
            }
            self._known = bypasses, layers
        return self._known[1]

    def _kind_of(self, layer: int) -> tuple[object, ...]:
        """The shapes of a layer's linears, and of its cache."""
        linears = [(self._names[path], self._base.linears[path]) for path in self._paths[layer]]
        shapes = [(name, linear.out_features, linear.in_features) for name, linear in linears]
        return (*shapes, self._base.caches[layer])
