"""Spans between the attention of two layers, which an executor computes as one call for engines.

Clients keep the keys and values, so their attention cuts the model, as the offloading of attention does
(Lamina, arXiv 2405.01814): from the linear where a layer's attention ends to those with which the next
layer's begins, with the residual, norms and feed-forward layer between them. Each row is treated alone: the
layer's input, which the residual needs, comes with the call. So a decode step takes one call a layer, where
linears and feed-forward layers take three.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers, layer_width
from coserve.errors import UnsupportedModel
from coserve.model.layer_parts import LayerParts
from coserve.model.linear import FrozenLinear
from coserve.split.linears import grouped
from coserve.split.messages import SpanShape
from coserve.split.native_spans import NativeSpan
from coserve.split.spans import BaseSpan, digest_beside, is_small, linears_of, passes_trial


class _AttentionSpan(BaseSpan):
    """The span after one layer's attention. It is given the layer's input [rows, width] and the rows
    [rows, in] that attention gives to its last linear, and has the layer's output [rows, width] and the
    products [rows, out] of the linears that follow."""

    def __init__(self, shape: SpanShape, layer: "_CutLayer", following: "_CutLayer | None") -> None:
        super().__init__(shape)
        self._layer, self._following = layer, following
        self._native: NativeSpan | None = None

    def run(self, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        hidden, attended = given
        y = self._layer.after_attention(hidden[None], attended[None])
        if self._following is None:
            return [y[0]]
        entering = self._following.before_attention(y)
        return [y[0], *(linear(entering)[0] for linear in self._following.inputs)]

    def by_kernels(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        return None if self._native is None else self._native(*given)

    @torch.no_grad()
    def find_native(self) -> None:
        """Has kernels compute it where they give what its modules give."""
        after = None if self._following is None else LayerParts.of(self._following.module)
        if (self._following is None) == (after is None):
            own = LayerParts.of(self._layer.module)
            self._native = NativeSpan.find(own, after, lambda *given: self.run(given, ()))


def attention_spans(model: PreTrainedModel, linears: Collection[str], like: Tensor) -> list[BaseSpan]:
    """Spans of the decoder layers whose linears are all among these frozen ones: which they are is seen from
    what layers contain, and by trying them with rows as `like`."""
    try:
        layers = decoder_layers(model)
    except UnsupportedModel:
        return []
    width = layer_width(model)
    own = [_CutLayer.of(path, layer, linears, width) for path, layer in layers.items()]
    found: list[BaseSpan] = []
    for layer, following in zip(own, [*own[1:], None], strict=True):
        if layer is not None:
            made = _AttentionSpan(_shape(layer, following, width), layer, following)
            if passes_trial(made, like):
                made.find_native()
                found.append(made)
    return found


def _shape(layer: "_CutLayer", following: "_CutLayer | None", width: int) -> SpanShape:
    after = [] if following is None else following.inputs
    layers = [layer] if following is None else [layer, following]
    return SpanShape(
        "attention",
        f"{layer.attention}.after",  # no module's path
        (width, layer.output.in_features),
        (width, *(linear.out_features for linear in after)),
        (layer.output.path, *layer.others, *(linear.path for linear in after)),
        {own.path: digest_beside(own.module) for own in layers},
    )


class _CutLayer:
    """A decoder layer whose attention begins with linears of the same input (`inputs`) and ends with one
    (`output`); `others` are the paths of its linears outside of attention."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        attention: str,
        inputs: Sequence[FrozenLinear],
        output: FrozenLinear,
        others: Sequence[str],
    ) -> None:
        """Replaces the forward of the attention at the path `attention`."""
        self.path, self.module, self.attention = path, module, attention
        self.inputs, self.output, self.others = inputs, output, others
        self._forward: Callable[..., Any] = module.forward
        self._lacking = _required(module)
        inner = module.get_submodule(attention.removeprefix(f"{path}."))
        self._gate = inner.forward = _Gate(inner.forward)

    @staticmethod
    def of(path: str, module: nn.Module, linears: Collection[str], width: int) -> "_CutLayer | None":
        """The layer at `path`, None where it is built in another way or has other linears than these; `width`
        is that of rows between layers."""
        own = linears_of(path, module)
        if not set(own) <= set(linears) or not is_small(module, own.values()):
            return None
        names = (name for name, child in module.named_children() if _has_index(child))
        if (attention := next(names, None)) is None:
            return None
        attention = f"{path}.{attention}"
        inside = [linear for linear in own if linear.startswith(f"{attention}.")]
        groups = grouped({linear: (own[linear].out_features, own[linear].in_features) for linear in inside})
        if len(groups) != 2:
            return None
        ends = [
            (inputs, outputs[0])
            for inputs, outputs in (groups, groups[::-1])  # a module may have them in either order
            if len(outputs) == 1 and own[outputs[0]].out_features == width
        ]
        if not ends:
            return None
        inputs, output = ends[0]
        others = [linear for linear in own if linear not in inside]
        return _CutLayer(path, module, attention, [own[linear] for linear in inputs], own[output], others)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [1, rows, width] for its input and the rows [1, rows, in] that attention gives
        to its last linear."""
        with self._gate.replaced(lambda _: (self.output(attended), None)):
            out = self._forward(hidden, **self._lacking)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y

    def before_attention(self, hidden: Tensor) -> Tensor:
        """Attention's input [1, rows, in] for the layer's input [1, rows, width]."""
        with self._gate.replaced(_reached):
            try:
                self._forward(hidden, **self._lacking)
            except _Reached as reached:
                return reached.given
        raise UnsupportedModel(f"{self.path} does not call its attention")


class _Gate:
    """The forward of an attention module (`own`), in whose place something else may be called on one
    thread."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self._here = threading.local()

    @contextmanager
    def replaced(self, instead: Callable[[Tensor], Any]) -> Iterator[None]:
        """Has `instead` called, with the module's input alone."""
        self._here.instead = instead
        try:
            yield
        finally:
            del self._here.instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        instead: Callable[[Tensor], Any] | None = getattr(self._here, "instead", None)
        if instead is None:
            return self.own(*args, **kwargs)
        return instead(args[0] if args else kwargs["hidden_states"])


@contextmanager
def gates_kept(model: nn.Module) -> Iterator[None]:
    """Context in which forwards of attention may be replaced: gates stand before the new ones."""
    gates = {module: own for module in model.modules() if isinstance(own := module.forward, _Gate)}
    yield
    for module, gate in gates.items():
        if module.forward is not gate:
            gate.own, module.forward = module.forward, gate


class _Reached(Exception):
    """A layer has come to its attention."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given


def _reached(given: Tensor) -> Any:
    raise _Reached(given)


def _required(module: nn.Module) -> dict[str, None]:
    """Arguments beside the first that a layer's forward has no default for: they are attention's."""
    _, *others = inspect.signature(module.forward).parameters.values()
    return {
        own.name: None
        for own in others
        if own.default is own.empty and own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY)
    }


def _has_index(child: nn.Module) -> bool:
    """Tells whether a layer's child is its attention, as `sublayers` does."""
    inside = list(child.modules())
    return any(hasattr(module, "layer_idx") for module in inside) and any(
        isinstance(module, FrozenLinear) for module in inside
    )
