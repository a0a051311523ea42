"""A script's modules and decoder layers that are one call while no adapter is in them.

Layers are called in passes without a cache. Consecutive ones are one call within a pass of the decoder: the
first of them returns the result of the last, and the others pass it on.
"""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from coserve.adapters.sites import decoder_of
from coserve.kernels.attention import causal_mask
from coserve.split.absent import check_frozen
from coserve.split.calls import Calls
from coserve.split.linears import transformers_model
from coserve.split.messages import SpanShape
from coserve.split.remote_group import RemoteSpan
from coserve.split.span_calls import SpanCall
from coserve.split.virtual import VirtualConv1D, VirtualLinear

Spans = Literal["forward", "always", "never"]
# Arguments of a layer that add nothing to a call: tables of positions follow from them.
_HARMLESS: Final = frozenset({
    "position_embeddings", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict",
})  # fmt: skip
Lengths = tuple[int, ...]  # of the sequences that the rows of a batch belong to, one after the other


def put_spans(model: nn.Module, calls: Calls, spans: Spans, layers: bool) -> None:
    """Makes one call of each module of the model that the executor computes as a whole, unless `spans` are
    never, and with `layers` of decoder layers."""
    _, own = transformers_model(model)
    whole: list[tuple[nn.Module, RemoteSpan]] = []
    for shape in calls.base.spans:
        remote, module = RemoteSpan(calls, shape), _module_at(own, shape.path.split("."))
        if module is None or "forward" in vars(module):  # the client's model is made of other modules
            layers = layers and shape.cuts != "layer"
        elif shape.cuts == "layer":
            whole.append((module, remote))
        elif shape.cuts == "module" and spans != "never":
            module.forward = ScriptModule(module, remote, spans)
    if layers and whole:
        ScriptLayers(decoder_of(own), whole)


class _ScriptSpan(SpanCall):
    """The call of a module in a model that a script drives. Its linears are virtual layers until PEFT
    replaces them."""

    def __init__(self, module: nn.Module, remote: RemoteSpan) -> None:
        super().__init__(module, remote)
        start = len(self.shape.path) + 1
        self._names = [(path, path[start:].split(".")) for path in self.shape.linears]

    @property
    def is_bare(self) -> bool:
        """Tells whether the module contains only the base's own computation, and once."""
        module = self.module
        if torch.is_autocast_enabled("cpu"):
            return False
        if module.training and getattr(module, "gradient_checkpointing", False):
            return False
        for path, names in self._names:
            linear = _module_at(module, names)
            if not isinstance(linear, VirtualLinear | VirtualConv1D) or linear.path != path:
                return False
            check_frozen(path, linear)
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            return False
        return not any(
            _is_watched(inner) or _is_random(inner) for inner in module.modules() if inner is not module
        )


class ScriptModule(_ScriptSpan):
    """The call of a module such as a feed-forward layer."""

    def __init__(self, module: nn.Module, remote: RemoteSpan, spans: Spans) -> None:
        super().__init__(module, remote)
        self._spans = spans

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "ScriptModule":
        copied = ScriptModule(memo[id(self.module)], self.remote, self._spans)  # of the copy being made
        copied.own = self.own
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if kwargs or len(args) != 1 or not isinstance(x := args[0], Tensor):
            return self.own(module, *args, **kwargs)
        goes_back = torch.is_grad_enabled() and x.requires_grad
        if (goes_back and self._spans != "always") or not self.is_bare:
            return self.own(module, x)
        return self.answer(x, lambda: self.own(module, x), self._called)

    def _called(self, x: Tensor) -> Tensor:
        return self.remote.forward([x], torch.is_grad_enabled())[0]


@dataclass(slots=True, eq=False)
class _LayersUnderWay:
    """A call of several layers under way in a pass. Layers up to `last` return its result `y`; `passed` are
    those that have done so, with their other arguments."""

    x: Tensor
    y: Tensor
    lengths: Lengths
    last: int
    passed: "list[tuple[ScriptLayer, tuple[Any, ...], dict[str, Any]]]"

    @property
    def next(self) -> int:
        """The number of the layer that follows."""
        return self.passed[-1][0].shape.number + 1


class _Pass(threading.local):
    """The decoder's pass on this thread. Without `is_joined` each layer has to give its own output."""

    is_joined = False
    run: _LayersUnderWay | None = None


class ScriptLayers:
    """Layers of one model that an executor computes."""

    def __init__(self, decoder: nn.Module, layers: Sequence[tuple[nn.Module, RemoteSpan]]) -> None:
        self.state = _Pass()
        self.layers = {remote.shape.number: ScriptLayer(self, layer, remote) for layer, remote in layers}
        for own in self.layers.values():
            own.module.forward = own
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end, always_call=True)

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_hidden_states")
        asked = getattr(decoder.config, "output_hidden_states", False) if asked is None else asked
        self.state.is_joined, self.state.run = not asked, None

    def _end(self, *_: Any) -> None:
        self.state.is_joined, self.state.run = False, None

    def joined(self, first: SpanShape, most: int) -> list[str]:
        """Paths of this layer and those after it, `most` in all, that can be one call with it. They have the
        same window, so that they are given the same mask."""
        paths = [first.path]
        if self.state.is_joined and not _is_watched(self.layers[first.number].module):
            while len(paths) < most and (after := self.layers.get(first.number + len(paths))) is not None:
                if after.shape.window != first.window or not after.may_join:
                    break
                paths.append(after.shape.path)
        return paths

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "ScriptLayers":
        return self  # hooks of a copied decoder do nothing


class ScriptLayer(_ScriptSpan):
    """The call of a decoder layer."""

    def __init__(self, owner: ScriptLayers, layer: nn.Module, remote: RemoteSpan) -> None:
        super().__init__(layer, remote)
        self._owner = owner
        self._signature = inspect.signature(type(layer).forward)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        """The own way of a copied layer: its calls would go through the original's pass."""
        layer = memo[id(self.module)]  # the copy that is being made
        return type(layer).forward.__get__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(self.module, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        state, run = self._owner.state, self._owner.state.run
        if not args or not isinstance(x := args[0], Tensor):
            return self.own(self.module, *args, **kwargs)
        if run is not None and x is run.y and run.next == self.shape.number <= run.last:
            if self._lengths(x, given) == run.lengths:
                run.passed.append((self, args[1:], kwargs))
                return self.given(x)
            x = _again(run)
        state.run = None
        lengths = self._lengths(x, given) if self.is_bare else None
        if lengths is None:
            return self.own(self.module, x, *args[1:], **kwargs)

        def called(x: Tensor, paths: Sequence[str] = ()) -> Tensor:
            return self.remote.forward([x], torch.is_grad_enabled(), paths, lengths)[0]

        def several(x: Tensor) -> Tensor:
            paths = self._owner.joined(self.shape, self.remote.most_layers(lengths))
            y = called(x, paths)
            if len(paths) > 1:
                last = self.shape.number + len(paths) - 1
                state.run = _LayersUnderWay(x, y, lengths, last, [(self, args[1:], kwargs)])
            return y

        return self.answer(x, lambda: self.own(self.module, x, *args[1:], **kwargs), called, several)

    @property
    def may_join(self) -> bool:
        """Tells whether it can be one call with the layer before it: nothing reads the rows between them."""
        return self.is_bare and bool(self.is_same) and not _is_watched(self.module)

    @property
    def content(self) -> object:
        """The modules, and the tensors of the client in them."""
        modules = list(self.module.modules())
        own = [module for module in modules if not isinstance(module, VirtualLinear | VirtualConv1D)]
        tensors = [x for module in own for x in (*module.parameters(False), *module.buffers(False))]
        return tuple(map(type, modules)), tuple((id(x), x._version) for x in tensors)

    def _lengths(self, x: Tensor, given: Mapping[str, Any]) -> Lengths | None:
        """The lengths of the sequences in a batch [batch, rows, width]. None where attention would not be
        each sequence's own from its first token on, or where anything else is requested."""
        own = tuple(self._signature.parameters)[:2]  # the layer and its input
        others = {name: x for name, x in given.items() if name not in _HARMLESS and name not in own}
        mask, positions = others.pop("attention_mask", None), others.pop("position_ids", None)
        past = others.pop("past_key_values", None)
        if any(value is not None and value is not False for value in others.values()):
            return None
        if x.ndim != 3 or not x.numel() or not _is_unused(past, self.shape.number):
            return None
        if positions is None and given.get("position_embeddings") is not None:
            return None
        return _lengths(x.shape[0], x.shape[1], mask, positions, self.shape.window, self.remote.longest)


def _again(run: _LayersUnderWay) -> Tensor:
    """Computes anew, one by one, the layers that have passed on a result, as a layer behind them cannot join
    their call. Returns the last one's output."""
    x = run.x
    for layer, args, kwargs in run.passed:
        y = layer.own(layer.module, x, *args, **kwargs)
        x = y[0] if isinstance(y, tuple) else y
    return x


def _is_unused(past: Any, layer: int) -> bool:
    """Tells whether nobody needs keys and values: there is no cache, or an empty one in a pass with a graph,
    as models make one by default that training never reads."""
    if past is None:
        return True
    try:
        return torch.is_grad_enabled() and int(past.get_seq_length(layer)) == 0
    except (AttributeError, IndexError, TypeError):
        return False


def _lengths(
    batch: int, rows: int, mask: Any, positions: Any, window: int | None, longest: int
) -> Lengths | None:
    """See `ScriptLayer._lengths`. Sequences begin where positions [1 or batch, rows] are 0; `mask` [1 or
    batch, 1, rows, rows] must be that of their causal attention; without one they begin with each of the
    batch."""
    if positions is None:
        begins = torch.zeros(batch, rows, dtype=torch.bool)
        begins[:, 0] = True
    else:
        if positions.ndim != 2 or positions.shape[1] != rows or positions.shape[0] not in (1, batch):
            return None
        positions = positions.expand(batch, rows).cpu()
        begins = positions == 0
        if not bool(begins[:, 0].all()) or not bool(((positions.diff() == 1) | begins[:, 1:]).all()):
            return None
    starts = begins.flatten().nonzero().flatten().tolist()
    ends = [*starts[1:], batch * rows]
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if max(lengths) > longest:
        return None
    if mask is None:
        return lengths if len(lengths) == batch and (window is None or rows <= window) else None
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2:] != (rows, rows):
        return None
    allowed = (mask if mask.dtype == torch.bool else mask == 0).cpu()
    number = begins.cumsum(1)
    wanted = (number[:, :, None] == number[:, None]) & causal_mask(rows, rows, window, allowed.device)
    return lengths if bool((allowed == wanted[:, None]).all()) else None


def _module_at(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The module inside of another by the names on the way; None where there is none."""
    found: nn.Module | None = module
    for name in names:
        found = None if found is None else found._modules.get(name)
    return found


def _is_watched(module: nn.Module) -> bool:
    """Tells whether a script has hooks at a module inside of a span."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_random(module: nn.Module) -> bool:
    """Tells whether the module draws random numbers in its present mode."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0
