"""The rows of a window group in a layer: in forward, and re-run for their gradient.

A window group is one or more windows of distinct micro-batches, concatenated in a batch of rows `[1, rows,
width]`. The frozen base multiplies all rows at once. Adapters, stores and attention see only the rows of
their own window: a NaN in one window reaches no other, and each window gets the same gradients as in a group
of one. A group of one joins and splits rows without copies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import LayerPaths
from coserve.attention.states import Core, States
from coserve.core.sequence import Span
from coserve.kernels.attention import Attended, AttentionSpec
from coserve.kernels.native.lora import LayerLora
from coserve.kernels.rows import concat_rows, split_rows
from coserve.model.batch import Keeper, LayerCalls
from coserve.model.graph import GraphRows, stand_in
from coserve.model.placement import Placement
from coserve.train.activations import ActivationStore
from coserve.train.save_policy import Fate
from coserve.train.states import mix_window
from coserve.train.window import KV, PastKV, Window, attend_window, attend_window_keeping

StoredWindow = tuple[ActivationStore, Window]  # a window, and the store of its micro-batch


@dataclass(slots=True)
class ForwardWindow:
    """A training window that goes forward through `layers`, of which it is through those below `reached`: a
    `Traveller`."""

    layers: range
    store: ActivationStore
    window: Window
    bypasses: Bypasses
    calls: LayerCalls
    reached: int = 0

    def input(self, layer: int) -> Tensor:
        """See `Traveller`."""
        return self.store.input(layer, self.window, self.bypasses)

    def take(self, layer: int, hidden: Tensor) -> None:
        """See `Traveller`."""
        self.store.hidden.save(layer, self.window, hidden[0])
        self.reached = layer + 1

    def reach(self, layer: int) -> None:
        """See `Traveller`."""
        self.reached = max(self.reached, layer)

    @property
    def passed(self) -> Span:
        """The layers passed so far."""
        return Span(self.layers.start, max(self.reached, self.layers.start))


class KeptRows:
    """A window group in a fused forward run: a `Part` that writes to the windows' stores, and the `Keeper`
    of its rows. `check` is called between products, and may raise (`train.pause`)."""

    def __init__(self, windows: Sequence[StoredWindow], check: Callable[[], object] = int) -> None:
        self._windows, self._check = windows, check
        self._sizes = [window.rows for _, window in windows]
        self._whole = _as_one_window(windows)
        self.count = sum(self._sizes)

    @property
    def keeper(self) -> Keeper | None:
        return self if any(store.saved.fates.keeps_products for store, _ in self._windows) else None

    def keep(self, path: str, product: Tensor) -> None:
        for (store, window), own in self._of_each(product):
            store.saved.save_product(path, window, own)

    def keep_sum(self, path: str, y: Tensor) -> None:
        self._check()
        for (store, window), own in self._of_each(y):
            store.saved.save_sum(path, window, own)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self._check()
        if spec.reads is not None:
            k, v = _join([store.kv.own(spec.reads, window) for store, window in self._windows])
        queries, keys, values = (split_rows(x, self._sizes, 2) for x in (q, k, v))
        if spec.reads is None:
            for (store, window), own_k, own_v in zip(self._windows, keys, values, strict=True):
                store.kv.save(layer, window, own_k[0], own_v[0])
        if self._whole is not None:
            return _attend_and_keep(layer, self._windows, self._whole, PastKV(), q, k, v, spec)
        parts = [
            _attend_and_keep(layer, [(store, window)], window, store.kv.past(layer, window), *own, spec)
            for (store, window), own in zip(
                self._windows, zip(queries, keys, values, strict=True), strict=True
            )
        ]
        return concat_rows(parts, 1)

    def mix(self, core: Core, start: int) -> Tensor:
        self._check()
        outputs = []
        for states, part in (
            (s.states, part) for s, window in self._windows for part in s.states.parts(window)
        ):
            kept = states.before(core.number, part)
            before = kept and tuple(state.clone() for state in kept)  # a row may write into what it is given
            out, after = mix_window(core, part, start, before)
            states.save(core.number, part, after)
            outputs.append(out)
            start += part.rows
        return concat_rows(outputs, 1)

    def _of_each(self, x: Tensor) -> "zip[tuple[StoredWindow, Tensor]]":
        """Each window with its rows of x [rows, width]."""
        return zip(self._windows, split_rows(x, self._sizes), strict=True)


def _checked(check: Callable[[], object], gradient: Tensor) -> None:
    """Calls `check` when the gradient of a product's output is there; a tensor's hook."""
    check()


class ReplayedRows(GraphRows):
    """A window group's rows while a layer is re-run for its gradient.

    Stored outputs are not recomputed, nor those on which no gradient depends. `past` and `states` (those
    before it, by mixer) are one per window, as leaves of the graph. `current` are the graph's own keys and
    values [1, groups, rows, width], None where the layer reads another layer's. `check` is called between
    products, in both directions, and may raise (`train.pause`); not where they are computed elsewhere, as
    answers under way are not left alone.
    """

    def __init__(
        self,
        windows: Sequence[StoredWindow],
        bypasses: Sequence[Bypasses],
        past: Sequence[PastKV],
        check: Callable[[], object] = int,
        states: Sequence[Mapping[int, States]] = (),
    ) -> None:
        super().__init__(bypasses, [window.rows for _, window in windows])
        self._windows, self._past, self.check = windows, past, check
        self._whole = _as_one_window(windows)
        self.current: KV | None = None
        self._states = states
        self.left: dict[int, list[States]] = {}  # the graph's states after each window, by mixer

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        y = super().linear(path, placement, x)
        if placement.group is None:
            self.check()
            if y.requires_grad:
                # Not a method: the graph would hold these rows, which hold the graph.
                y.register_hook(partial(_checked, self.check))  # type: ignore[no-untyped-call]
        return y

    def computed(self, paths: LayerPaths) -> LayerLora | None:
        """The low-rank bypasses in a layer for kernels that compute all its products and go back through
        them; None where they do not read one, or products are kept."""
        if any(
            store.saved.fates.of(p) is not Fate.COMPUTED for store, _ in self._windows for p in paths.linears
        ):
            return None
        found = self._lora.native(paths)
        return found.lora if found is not None and all(rows.goes_back for rows in found.lora.rows) else None

    def back_to_matrices(self, path: str, x: Tensor, grad: Tensor, of_x: Tensor | None) -> dict[int, Tensor]:
        """Gradients of the matrices of low-rank bypasses at a linear, by their identity, given its input x
        [1, rows, in] and the gradient of its output [1, rows, out]; for rows that are in no graph. The
        bypasses' gradient for x is added to `of_x` unless that is None."""
        self.check()
        if (segments := self._lora.at(path)) is None:
            return {}
        found = segments.backward(grad[0], x[0], None if of_x is None else of_x[0])
        pairs = zip((*segments.weights.a, *segments.weights.b), (*found[0], *found[1]), strict=True)
        return {id(matrix): gradient for matrix, gradient in pairs}

    def own(self, layer: int) -> KV:
        """The rows' own keys and values in a layer, [1, groups, rows, width]."""
        return _join([store.kv.own(layer, window) for store, window in self._windows])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.reads is None:
            self.current = (k, v)
            keys, values = self.own(layer)
            k, v = stand_in(k, keys), stand_in(v, values)
        else:
            k, v = _join([past.shared for past in self._past if past.shared is not None])
        kept = [store.saved.attended(layer, window) for store, window in self._windows]
        if self._whole is not None:
            found = [of for of in kept if of is not None]
            all_kept = _join_attended(found) if len(found) == len(kept) else None
            return attend_window(q, k, v, PastKV(), self._whole, spec, all_kept)
        queries, keys_, values_ = (split_rows(x, self.sizes, 2) for x in (q, k, v))
        parts = [
            attend_window(queries[i], keys_[i], values_[i], self._past[i], window, spec, kept[i])
            for i, (_, window) in enumerate(self._windows)
        ]
        return concat_rows(parts, 1)

    def mix(self, core: Core) -> Tensor:
        outputs, start = [], 0
        after = self.left[core.number] = list[States]()
        for (_, window), states in zip(self._windows, self._states, strict=True):
            out, left = mix_window(core, window, start, states.get(core.number))
            outputs.append(out)
            after.append(left)
            start += window.rows
        return concat_rows(outputs, 1)

    def _completed(self, path: str, placement: Placement, y: Tensor) -> Tensor:
        is_used = any(store.saved.fates.of(path) is not Fate.UNUSED for store, _ in self._windows)
        return super()._completed(path, placement, y) if is_used else y

    def _kept(self, path: str, x: Tensor) -> tuple[Tensor | None, Sequence[bool]]:
        fates = [store.saved.fates.of(path) for store, _ in self._windows]
        if Fate.COMPUTED in fates:
            return None, [False] * len(fates)
        is_added = [fate is not Fate.KEPT for fate in fates]
        width = self._windows[0][0].base.linears[path].out_features
        shape = (*x.shape[:-1], width)
        if Fate.KEPT not in fates and Fate.SUM not in fates:
            return x.new_zeros(()).expand(shape), is_added
        parts = [
            store.saved.product(path, window)
            if fate in (Fate.KEPT, Fate.SUM)
            else x.new_zeros(()).expand(window.rows, width)
            for fate, (store, window) in zip(fates, self._windows, strict=True)
        ]
        return concat_rows(parts).view(shape), is_added

    def _summed(self, path: str, y: Tensor) -> Tensor:
        fates = [store.saved.fates.of(path) for store, _ in self._windows]
        if Fate.SIGN not in fates:
            return y
        of_each = zip(fates, self._windows, split_rows(y.detach().flatten(0, -2), self.sizes), strict=True)
        parts = [
            store.saved.sign(path, window, own) if fate is Fate.SIGN else own
            for fate, (store, window), own in of_each
        ]
        return stand_in(y, concat_rows(parts).view(y.shape))


def _attend_and_keep(
    layer: int,
    windows: Sequence[StoredWindow],
    whole: Window,
    past: PastKV,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of `windows`, computed as the one window `whole`; stores that keep it receive their rows."""
    keeps = [store.saved.fates.of_attention(layer) is Fate.KEPT for store, _ in windows]
    if not any(keeps):
        return attend_window(q, k, v, past, whole, spec)
    attended = attend_window_keeping(q, k, v, past, whole, spec)
    sizes = [window.rows for _, window in windows]
    of_each = zip(*(split_rows(x, sizes, 1) for x in attended), strict=True)
    for (store, window), is_kept, own in zip(windows, keeps, of_each, strict=True):
        if is_kept:
            store.saved.save_attended(layer, window, Attended(*own))
    return attended.out


def _join(pairs: Sequence[KV]) -> KV:
    """Concatenates keys, and values, of windows."""
    return concat_rows([k for k, _ in pairs], 2), concat_rows([v for _, v in pairs], 2)


def _join_attended(kept: Sequence[Attended]) -> Attended:
    return Attended(concat_rows([of.out for of in kept], 1), concat_rows([of.lse for of in kept], 1))


def _as_one_window(windows: Sequence[StoredWindow]) -> Window | None:
    """One window with the examples of all; None if anything precedes any of their examples."""
    if any(w.past or w.before or w.prompt or store.kv.virtual for store, w in windows):
        return None
    pieces = tuple(piece for _, w in windows for piece in w.pieces)
    return Window(0, sum(w.rows for _, w in windows), 0, pieces)
