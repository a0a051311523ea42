"""Proof that a base can be trained: windows of examples give the gradients of whole examples.

One layer of each kind runs as in training (windows forward, then back from the right) and is compared with
one pass over all rows under autograd, with plain attention; once with inputs stored alone, and once with all
that can be stored. So models that pass more than a hidden state from layer to layer, or whose layers cannot
be re-run for a window of rows or with stored outputs, are found before a job starts.
"""

from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypasses, exact_type
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.sites import Kind
from coserve.attention.states import Core
from coserve.core.sequence import Direction, Span
from coserve.errors import UnsupportedModel
from coserve.kernels import reference
from coserve.kernels.attention import AttentionSpec, causal_mask
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.graph import GraphRows
from coserve.model.placement import Offer
from coserve.model.probe import TOLERANCE, draw
from coserve.model.refusal import refusing
from coserve.model.routing import NotedChoices, TiesAsBefore, of_window
from coserve.model.staged.absent import AbsentLayer
from coserve.train.activations import ActivationStore
from coserve.train.backward import Backward, BackwardWindow, layer_gradients, vjp
from coserve.train.save_policy import Fate, Fates
from coserve.train.tail import Tail
from coserve.train.window import Window
from coserve.train.window_group import ForwardWindow, KeptRows

_EXAMPLES: Final = (8, 5)  # rows: 13 in all, a size that hardly occurs elsewhere in a model
_WINDOWS: Final = ((0, 6), (6, 7))  # (start, rows): the second goes on within the first example
# Some mixers have other code for one row after a state than for several.
_STATE_WINDOWS: Final = ((0, 4), (4, 3), (7, 6))
_RANK: Final = 2
# Of the largest gradient: smaller ones (of queries that hardly choose) are mostly rounding.
_SMALL: Final = 0.1

# In low precision an unlucky draw may differ by its rounding alone (on processors without bfloat16 units a
# small Gemma 4 did, by 1.5 times what is allowed); what is wrong differs in every draw.
_DRAWS: Final = 3

_LOSS: Final = "the gradient of the loss"

Gradients = dict[str, Tensor]


def prove_training(base: Base) -> None:
    """Raises UnsupportedModel if the base's gradients in windows are not those of whole examples, NotOffered
    if the base gives none."""
    for path, linear in base.linears.items():
        linear.placement.expect(Offer.BACKWARD, path)
    with refusing(base.model.config.model_type, "cannot be trained"):
        for seed in range(_DRAWS):
            try:
                _prove(base, seed)
                return
            except UnsupportedModel:
                if seed == _DRAWS - 1 or exact_type(base.dtype) == base.dtype:
                    raise


def _prove(base: Base, seed: int) -> None:
    """Raises UnsupportedModel if the gradients of one draw are not those of whole examples."""
    layers = _one_of_each_kind(base)
    paths = [p for p, s in base.sites.items() if s.kind is Kind.LINEAR and s.stage in layers]
    everything = Fates(dict.fromkeys(paths, Fate.SUM), dict.fromkeys(layers, Fate.KEPT))
    for fates in (Fates(), everything):
        proof = _Proof(base, layers, paths, fates, torch.Generator().manual_seed(seed))
        want, got = proof.whole(), proof.in_windows()
        least = _SMALL * max(float(want[name].float().norm()) for name in proof.parameters())
        for name, gradient in want.items():
            _expect(base, name, got[name], gradient, least)


def _expect(base: Base, name: str, got: Tensor, want: Tensor, least: float) -> None:
    """Raises UnsupportedModel if `got` differs from `want` by more than the type allows, relative to the norm
    of `want`, or to `least` if that is more."""
    error = float((got.float() - want.float()).norm().nan_to_num(torch.inf))
    allowed = TOLERANCE[base.dtype] * max(float(want.float().norm()), least)
    if not error <= allowed:
        raise UnsupportedModel(
            f"{base.model.config.model_type} cannot be trained in windows: {name} differs from autograd's by "
            f"{error:.1e} (allowed {allowed:.0e})"
        )


def _one_of_each_kind(base: Base) -> list[int]:
    """Layers that differ in their modules or shapes, from below. The first layer only if its kind has no
    other, as its input needs no gradient."""
    kinds: dict[object, int] = {}
    for layer in (*range(1, base.depth), 0):
        module = base.model.get_submodule(base.chain.blocks[layer].path)
        if isinstance(module, AbsentLayer):
            continue
        parts = ((n, type(m), getattr(m, "out_features", None)) for n, m in module.named_modules())
        kinds.setdefault((*parts, *((n, p.shape) for n, p in module.named_parameters())), layer)
    read = {reads for layer in kinds.values() if (reads := base.caches[layer].reads) is not None}
    return sorted({*kinds.values(), *read})


class _Proof:
    """A LoRA at the linears `paths` of some `layers`, and a micro-batch of two examples that has gone forward
    in windows, up to the highest of these. The gradient for each layer's output is random, and so is the last
    layer's output."""

    def __init__(
        self, base: Base, layers: list[int], paths: list[str], fates: Fates, generator: torch.Generator
    ) -> None:
        self._base, self._layers, self._generator = base, layers, generator
        self._adapter = {path: self._lora(path) for path in paths}
        self._bypasses = Bypasses({}, self._adapter)
        (tokens,) = draw(base, sum(_EXAMPLES))
        self._store = ActivationStore(base, _EXAMPLES, tokens, tokens.roll(-1), fates)
        windows = _STATE_WINDOWS if base.mixers else _WINDOWS
        self._windows = [self._store.window(*window) for window in windows]
        self._all = self._store.window(0, sum(_EXAMPLES))
        like = self._store.hidden.last(self._all)
        self._gradients = {layer: self._draw(*like.shape) for layer in layers}
        self._choices: dict[int, list[Tensor]] = {}
        for window in self._windows:
            self._forward(window)
        self._store.hidden.save(base.depth - 1, self._all, self._draw(*like.shape)[0])

    @torch.no_grad()
    def _forward(self, window: Window) -> None:
        layers, calls = range(self._layers[-1] + 1), self._store.calls_for(window)
        rows = FusedRows([KeptRows([(self._store, window)])], [(slice(0, window.rows), self._bypasses)])
        going = ForwardWindow(layers, self._store, window, self._bypasses, calls)
        self._base.chain.forward([going], compose=lambda _: (rows, calls))

    def whole(self) -> Gradients:
        """Gradients by name, under autograd, all rows at once."""
        rows, calls = _WholeRows(self._bypasses), self._store.calls_for(self._all)
        inputs = (self._store.input(layer, self._all, self._bypasses) for layer in self._layers)
        alone = list(map(_AtLayer, self._layers, inputs))
        asked = {_input_of(at.layer): at.x for at in alone if at.layer > 0} | self.parameters()
        with ExitStack() as visits:
            for part in (*(self._base.chain.blocks[layer] for layer in self._layers), self._base.chain.ends):
                visits.enter_context(part.visit(Direction.BACKWARD))
            with torch.enable_grad(), NotedChoices() as noted:
                for at in alone:
                    self._base.chain.forward([at], compose=lambda _: (rows, calls))
                    self._choices[at.layer], noted.chosen = noted.chosen, []
            found = vjp([at.output for at in alone], list(self._gradients.values()), list(asked.values()))
            of_loss = self._of_loss()
        return {_LOSS: of_loss} | dict(zip(asked, map(_or_zeros, found, asked.values()), strict=True))

    def in_windows(self) -> Gradients:
        """Gradients by name, computed in windows as in training; requires a call of `whole` before."""
        leaves = {layer: self._leaves(layer) for layer in range(self._base.depth)}
        backward = Backward(self._store, leaves, _accumulate)
        tail = Tail(self._store, (), 1.0, backward.accumulate)
        for window in reversed(self._windows):
            tail.loss(window, self._bypasses)
        gradients = {_LOSS: self._store.hidden.gradient(self._all).clone()}
        span = Span(0, self._base.depth)
        windows = [backward.start(window, span, self._bypasses) for window in self._windows]

        def go(layer: int) -> None:
            if layer in self._layers:
                below = [self._through(layer, window) for window in reversed(windows)]
                gradients[_input_of(layer)] = torch.cat(below[::-1], dim=1)

        self._base.chain.backward(range(self._layers[-1], -1, -1), go)
        return gradients | {name: _or_zeros(leaf.grad, leaf) for name, leaf in self.parameters().items()}

    def _through(self, layer: int, going: BackwardWindow) -> Tensor:
        """Takes a window back through a layer; returns the gradient for the layer's input."""
        going.gradient = self._gradients[layer][:, going.window.span]
        noted = of_window(self._choices[layer], self._all.rows, going.window.span)
        with TiesAsBefore(noted, TOLERANCE[self._base.dtype]):
            going.accumulate(layer, *layer_gradients(layer, [going]))
        return going.gradient

    def _of_loss(self) -> Tensor:
        hidden = self._store.hidden.last(self._all).clone().requires_grad_()
        with torch.enable_grad():
            logits = self._base.tail(hidden)
            loss = F.cross_entropy(logits.to(exact_type(logits.dtype)), self._store.labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, hidden)
        return gradient

    def parameters(self) -> Gradients:
        return {
            f"the gradient of {path}.{name}": leaf
            for path, bypass in self._adapter.items()
            for name, leaf in bypass.parameters().items()
        }

    def _leaves(self, layer: int) -> tuple[Tensor, ...]:
        here = (b for path, b in self._adapter.items() if self._base.sites[path].stage == layer)
        return tuple(leaf for bypass in here for leaf in bypass.parameters().values())

    def _lora(self, path: str) -> LoRABypass:
        linear = self._base.linears[path]  # of which a rank may have a part
        a, b = self._draw(_RANK, linear.in_features), self._draw(linear.out_features, _RANK)
        return LoRABypass((a / linear.in_features**0.5).requires_grad_(), (b / 4).requires_grad_(), 1.0)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._base.device, self._base.dtype)


class _AtLayer:
    """All rows at one layer, whose input x [1, rows, width] is a leaf of the graph: a `Traveller`."""

    def __init__(self, layer: int, x: Tensor) -> None:
        self.layer, self.layers = layer, range(layer, layer + 1)
        self.x = x.detach().requires_grad_(layer > 0)

    def input(self, layer: int) -> Tensor:
        return self.x

    def take(self, layer: int, hidden: Tensor) -> None:
        self.output = hidden

    def reach(self, layer: int) -> None:
        """Nothing is elsewhere yet."""


class _WholeRows(GraphRows):
    """Whole examples end to end, each attending within itself; keys and values stay in the graph, also those
    of other layers."""

    def __init__(self, bypasses: Bypasses) -> None:
        super().__init__([bypasses], [sum(_EXAMPLES)])
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        outputs = []
        k, v = self._given.setdefault(layer, (k, v) if spec.reads is None else self._given[spec.reads])
        parts = zip(*(torch.split(x, list(_EXAMPLES), 2) for x in (q, k, v)), strict=True)
        for queries, keys, values in parts:
            rows = queries.shape[2]
            allowed = causal_mask(rows, rows, spec.window, q.device)
            outputs.append(
                reference.attention(queries, keys, values, spec.scale, allowed, spec.softcap, spec.sinks)
            )
        return torch.cat(outputs, 2).transpose(1, 2)

    def mix(self, core: Core) -> Tensor:
        spans = (slice(*span) for span in pairwise(accumulate(_EXAMPLES, initial=0)))
        return torch.cat([core.run(rows, 1, None)[0] for rows in spans], 1)


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _input_of(layer: int) -> str:
    return f"the gradient for what layer {layer} is given"
