"""Spans: modules of a base that an executor computes as one call, feed-forward layers above all.

Between two linears of such a module there is no state of the client, unless an adapter is there. So a row
crosses once each way, instead of once for each linear and at the widths between them: 16 KB a token instead
of 100 KB for Llama-3.1-8B's feed-forward layer. A span keeps nothing between calls: backward it is computed
anew from its input. Attention is no span: it depends on other rows, whose keys and values clients have.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from coserve.model.linear import FrozenLinear
from coserve.split.messages import Direction, SpanShape

MOST_SPANS: Final = 512  # offered; a base with more of them has experts of a few linears each
_ROWS: Final = 2048  # computed at once: rows between the linears are several times as wide
_TRIED: Final = 7  # rows
_BESIDE: Final = 0.02  # bytes of norms and the like beside linears, at most: fused experts are far more
_APART: Final = 0.05  # relative: above rounding in every type, and below another row's influence


class SpanModule:
    """A module whose linears are frozen ones, with its description for clients."""

    def __init__(self, module: nn.Module, shape: SpanShape) -> None:
        self._module, self.shape = module, shape

    def compute(self, direction: Direction, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs [rows, out] of inputs [rows, in], or gradients of inputs given these and the outputs'."""
        parts = zip(*(torch.split(tensor, _ROWS) for tensor in tensors), strict=True)
        run = self._forward if direction == "forward" else self._backward
        found = [run(*part) for part in parts]
        return [found[0] if len(found) == 1 else torch.cat(found)]

    def _forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self._module(x[None])[0]
        return y

    def _backward(self, x: Tensor, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            y = self._module(given[None])[0]
        (found,) = torch.autograd.grad(y, given, grad)
        return found


def find_spans(model: nn.Module, linears: Collection[str], like: Tensor) -> list[SpanModule]:
    """The largest modules that have two or more of these frozen linears, no other tensor, and outputs that
    depend on the same row of their one input alone. They are found by their contents, and by trying them with
    rows of the type and on the device of `like`."""
    found: list[SpanModule] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{span.shape.path}.") for span in found):
            continue
        own = linears_of(path, module)
        if len(own) < 2 or not set(own) <= set(linears) or _has_tensors(module):
            continue
        if (shape := _tried(path, module, own, like)) is not None:
            found.append(SpanModule(module, shape))
    return found[:MOST_SPANS]


def linears_of(path: str, module: nn.Module) -> dict[str, FrozenLinear]:
    """The frozen linears inside of the module at `path`, by their paths."""
    return {
        f"{path}.{name}".removeprefix("."): own
        for name, own in module.named_modules()
        if isinstance(own, FrozenLinear)
    }


def is_small(layer: nn.Module, linears: Collection[FrozenLinear]) -> bool:
    """Tells whether a layer contains only norms and the like beside these linears of it."""
    beside = sum(x.nbytes for x in (*layer.parameters(), *layer.buffers()))
    return bool(linears) and beside <= _BESIDE * sum(own.placement.nbytes for own in linears)


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _tried(
    path: str, module: nn.Module, linears: Mapping[str, FrozenLinear], like: Tensor
) -> SpanShape | None:
    """Runs it for some rows, and for fewer of them in another order."""
    inputs = next(iter(linears.values())).in_features
    x = torch.randn(1, _TRIED, inputs, generator=torch.Generator().manual_seed(0)).to(like)
    order = [4, 1, 6]
    try:
        with torch.no_grad():
            y, some = module(x), module(x[:, order])
    except Exception:  # it takes other arguments, such as attention
        return None
    if not isinstance(y, Tensor) or y.ndim != 3 or y.shape[:2] != x.shape[:2] or y.dtype != like.dtype:
        return None
    if not is_close(some, y[:, order]):
        return None
    return SpanShape(path, inputs, y.shape[-1], tuple(linears))


def is_close(found: Tensor, wanted: Tensor, apart: float = _APART) -> bool:
    """Tells whether these are the same numbers up to rounding; False for numbers that are not finite."""
    found, wanted = found.float(), wanted.float()
    return bool((found - wanted).norm() <= apart * wanted.norm())
