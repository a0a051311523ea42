"""A script's decoder layers that are one call while no adapter is in them, in passes without a cache.

Only the bound `forward` of a layer is replaced. It computes the layer itself wherever the executor's result
would differ. Consecutive layers are one call within a pass of the decoder: the first of them returns the
result of the last, and the others pass it on.
"""

import inspect
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.kernels.attention import causal_mask
from coserve.split.absent import check_frozen
from coserve.split.messages import BlockShape
from coserve.split.remote_group import RemoteBlocks
from coserve.split.span_calls import TOLERANCE, is_random, is_watched, module_at
from coserve.split.spans import is_close
from coserve.split.virtual import VirtualConv1D, VirtualLinear

_log = logging.getLogger(__name__)
# Arguments of a layer that add nothing to a call: tables of positions follow from them.
_HARMLESS: Final = frozenset({
    "position_embeddings", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict",
})  # fmt: skip
Lengths = tuple[int, ...]  # of the sequences that the rows of a batch belong to, one after the other


@dataclass(slots=True, eq=False)
class _LayersUnderWay:
    """A call of several layers under way in a pass. Layers up to `last` return its result `y`; `passed` are
    those that have done so, with their other arguments."""

    x: Tensor
    y: Tensor
    lengths: Lengths
    last: int
    passed: "list[tuple[BlockCall, tuple[Any, ...], dict[str, Any]]]"

    @property
    def next(self) -> int:
        """The number of the layer that follows."""
        return self.passed[-1][0].shape.number + 1


class _Pass(threading.local):
    """The decoder's pass on this thread. Without `is_joined` each layer has to give its own output."""

    is_joined = False
    run: _LayersUnderWay | None = None


class BlockCalls:
    """Layers of one model that an executor computes."""

    def __init__(self, decoder: nn.Module, layers: Mapping[int, nn.Module], remote: RemoteBlocks) -> None:
        """`layers` are by their numbers in the model."""
        self.remote, self.state = remote, _Pass()
        shapes = {shape.number: shape for shape in remote.shape.layers}
        self.layers = {number: BlockCall(self, layer, shapes[number]) for number, layer in layers.items()}
        for number, layer in layers.items():
            layer.forward = self.layers[number]
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end, always_call=True)

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_hidden_states")
        asked = getattr(decoder.config, "output_hidden_states", False) if asked is None else asked
        self.state.is_joined, self.state.run = not asked, None

    def _end(self, *_: Any) -> None:
        self.state.is_joined, self.state.run = False, None

    def joined(self, first: BlockShape) -> list[str]:
        """Paths of this layer and those after it that can be one call with it. They have the same window, so
        that they are given the same mask."""
        paths = [first.path]
        if self.state.is_joined and not is_watched(self.layers[first.number].layer):
            while (after := self.layers.get(first.number + len(paths))) is not None:
                if after.shape.window != first.window or not after.may_join:
                    break
                paths.append(after.shape.path)
        return paths

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "BlockCalls":
        return self  # hooks of a copied decoder do nothing


class BlockCall:
    """The `forward` of a layer that an executor may compute.

    Its first rows are computed both here and there. Where the results differ (other norms, another position
    table, dropout), the layer is computed here until something in it changes.
    """

    def __init__(self, owner: BlockCalls, layer: nn.Module, shape: BlockShape) -> None:
        self.shape = shape
        self._owner = owner
        self._of = weakref.ref(layer)  # which has this object
        start = len(shape.path) + 1
        self._names = [(path, path[start:].split(".")) for path in shape.linears]
        self._signature = inspect.signature(type(layer).forward)
        self._seen: dict[bool, tuple[object, bool]] = {}  # by training: what was compared, and the outcome
        self._is_tuple = False

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        """The own way of a copied layer: its calls would go through the original's pass."""
        layer = memo[id(self.layer)]  # the copy that is being made
        return type(layer).forward.__get__(layer)

    @property
    def layer(self) -> nn.Module:
        found = self._of()
        assert found is not None, "it is called by its layer"
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(self.layer, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        state, run = self._owner.state, self._owner.state.run
        if not args or not isinstance(x := args[0], Tensor):
            return self.own(*args, **kwargs)
        if run is not None and x is run.y and run.next == self.shape.number <= run.last:
            if self._lengths(x, given) == run.lengths:
                run.passed.append((self, args[1:], kwargs))
                return self._given(x)
            x = _again(run)
            args = (x, *args[1:])
        state.run = None
        lengths = self._lengths(x, given) if self._is_bare else None
        if lengths is None:
            return self.own(*args, **kwargs)
        if not self._is_known:
            y = self.own(*args, **kwargs)
            self._compare(x, y, lengths)
            if not (self._is_same and torch.is_grad_enabled() and x.requires_grad):
                return y  # else a checkpoint would not find the same graph again
        if not self._is_same:
            return self.own(*args, **kwargs)
        paths = self._owner.joined(self.shape)[: self._owner.remote.most_layers(lengths)]
        y = self._owner.remote.call(paths, x, lengths)
        if len(paths) > 1:
            last = self.shape.number + len(paths) - 1
            state.run = _LayersUnderWay(x, y, lengths, last, [(self, args[1:], kwargs)])
        return self._given(y)

    def _given(self, y: Tensor) -> Any:
        """The output in the layer's own format."""
        return (y,) if self._is_tuple else y

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own output."""
        return type(self.layer).forward(self.layer, *args, **kwargs)

    @property
    def _is_bare(self) -> bool:
        """Tells whether the layer contains only the base's own computation, and once."""
        layer = self.layer
        if torch.is_autocast_enabled("cpu") or (
            layer.training and getattr(layer, "gradient_checkpointing", False)
        ):
            return False
        for path, names in self._names:
            linear = module_at(layer, names)
            if not isinstance(linear, VirtualLinear | VirtualConv1D) or linear.path != path:
                return False
            check_frozen(path, linear)
        if torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
            return False
        return not any(
            is_watched(inner) or is_random(inner) for inner in layer.modules() if inner is not layer
        )

    @property
    def may_join(self) -> bool:
        """Tells whether it can be one call with the layer before it: nothing reads the rows between them."""
        return self._is_bare and self._is_same and not is_watched(self.layer)

    @property
    def _is_known(self) -> bool:
        """Tells whether its present state was compared."""
        outcome = self._seen.get(self.layer.training)
        return outcome is not None and outcome[0] == self._content()

    @property
    def _is_same(self) -> bool:
        return self._is_known and self._seen[self.layer.training][1]

    def _content(self) -> object:
        """The state for which a comparison holds: the modules, and the tensors of the client in them."""
        modules = list(self.layer.modules())
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
        return _lengths(
            x.shape[0], x.shape[1], mask, positions, self.shape.window, self._owner.remote.longest
        )

    def _compare(self, x: Tensor, y: Any, lengths: Lengths) -> None:
        """Notes whether y is the executor's result for x; notes nothing where y is not finite."""
        self._is_tuple = isinstance(y, tuple)
        own = y[0] if isinstance(y, tuple) and len(y) == 1 else y
        if not isinstance(own, Tensor) or own.shape != x.shape:
            is_same = False
        elif not bool(own.isfinite().all()):
            return
        else:
            found = self._owner.remote.call([self.shape.path], x.detach(), lengths)
            is_same = is_close(found, own.detach(), TOLERANCE.get(own.dtype, 1e-4))
        self._seen[self.layer.training] = self._content(), is_same
        if not is_same:
            _log.info("%s is not computed as a whole here", self.shape.path)


def _again(run: _LayersUnderWay) -> Tensor:
    """Computes anew, one by one, the layers that have passed on a result, as a layer behind them cannot join
    their call. Returns the last one's output."""
    x = run.x
    for block, args, kwargs in run.passed:
        y = block.own(x, *args, **kwargs)
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
    """See `BlockCall._lengths`. Sequences begin where positions [1 or batch, rows] are 0; `mask` [1 or batch,
    1, rows, rows] must be that of their causal attention; without one they begin with each of the batch."""
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
