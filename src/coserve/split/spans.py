"""Spans: modules of a base between two cuts, which an executor computes as one call.

Rows cross at the cuts alone, and not at the widths between linears inside: 16 KB a token instead of 100 KB
for Llama-3.1-8B's feed-forward layer. Cuts are before and after a module (`module_spans`), after one layer's
attention and before the next one's (`attention_spans.py`), and around decoder layers (`layer_spans.py`).
Nothing is kept between calls: backward a span is computed anew from its inputs.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from coserve.model.contents import contents_of
from coserve.model.linear import FrozenLinear
from coserve.model.origin import digest_of
from coserve.split.messages import Direction, SpanShape

_log = logging.getLogger(__name__)
MOST_SPANS: Final = 512  # modules offered; a base with more of them has experts of a few linears each
_ROWS: Final = 2048  # computed at once: rows between the linears are several times as wide
_TRIED: Final = (5, 3)  # rows, or tokens of sequences
_BESIDE: Final = 0.02  # bytes of norms and the like beside linears, at most: fused experts are far more
_APART: Final = 0.05  # relative: above rounding in every type, and below another row's influence


class BaseSpan(ABC):
    """A span of a model whose linears are frozen ones, with its description for clients."""

    def __init__(self, shape: SpanShape) -> None:
        self.shape = shape

    @abstractmethod
    def run(self, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """The tensors [rows, width] at the second cut for those at the first, by the model's own modules and
        in the current graph. `lengths` are those of sequences, of a span that has `longest`."""

    def by_kernels(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """As `run` without a graph; None where modules are faster, or kernels do not give the same."""
        return None


def compute(
    spans: Sequence[BaseSpan], direction: Direction, tensors: Sequence[Tensor], lengths: Sequence[int] = ()
) -> list[Tensor]:
    """The tensors [rows, width] behind spans that follow each other, for those ahead of them. Backward, the
    gradients of the latter, given these tensors and the gradients of the former."""
    found, begin = [], 0
    run = _outputs if direction == "forward" else _gradients
    for rows, own in pieces(len(tensors[0]), lengths, _ROWS):
        found.append(run(spans, [tensor[begin : begin + rows] for tensor in tensors], own))
        begin += rows
    return found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]


def _outputs(spans: Sequence[BaseSpan], given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    return list(_cuts(spans, given, lengths)[-1])


@torch.no_grad()
def _cuts(
    spans: Sequence[BaseSpan], given: Sequence[Tensor], lengths: Sequence[int]
) -> Sequence[Sequence[Tensor]]:
    """The tensors at each cut."""
    cuts = [given]
    for span in spans:
        short = span.by_kernels(cuts[-1])
        cuts.append(span.run(cuts[-1], lengths) if short is None else short)
    return cuts


def _gradients(spans: Sequence[BaseSpan], tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """One span's activations are there at a time."""
    count = len(spans[0].shape.inputs)
    grads = list(tensors[count:])
    cuts = _cuts(spans[:-1], tensors[:count], lengths)
    for span, inputs in zip(reversed(spans), reversed(cuts), strict=True):
        with torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in inputs]
            found = span.run(given, lengths)
        grads = list(torch.autograd.grad(found, given, grads))
    return grads


def pieces(rows: int, lengths: Sequence[int], most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Counts of rows that are computed at once, with the lengths of their sequences: at most `most` rows, or
    one longer sequence. Without lengths each row is alone."""
    if not lengths:
        yield from ((min(most, rows - begin), ()) for begin in range(0, rows, most))
        return
    part: list[int] = []
    for length in lengths:
        if part and sum(part) + length > most:
            yield sum(part), tuple(part)
            part = []
        part.append(length)
    yield sum(part), tuple(part)


@torch.no_grad()
def passes_trial(span: BaseSpan, like: Tensor) -> bool:
    """Tells by a trial with rows of the type and on the device of `like` whether some rows, or one of two
    sequences, give the same without the others."""
    shape, made, rows = span.shape, torch.Generator().manual_seed(0), sum(_TRIED)
    given = [torch.randn(rows, width, generator=made).to(like) for width in shape.inputs]
    lengths, some = ((), [4, 1, 6]) if not shape.longest else (_TRIED, [*range(_TRIED[0], rows)])
    back: list[Tensor] = []
    try:
        every = compute([span], "forward", given, lengths)
        few = compute([span], "forward", [tensor[some] for tensor in given], lengths[1:])
        if shape.longest:
            back = compute([span], "backward", [*given, *every], lengths)
    except Exception as error:  # it takes other arguments, such as attention, or is built in another way
        _log.info("%s is not computed as a whole: %s", shape.path, error)
        return False
    widths = [*shape.outputs, *(shape.inputs if back else ())]
    return all(
        y.shape == (rows, width) and y.dtype == like.dtype
        for y, width in zip([*every, *back], widths, strict=True)
    ) and all(is_close(part, y[some]) for y, part in zip(every, few, strict=True))


class _ModuleSpan(BaseSpan):
    """A module, feed-forward layers above all. Attention is none: it depends on other rows, whose keys and
    values clients have."""

    def __init__(self, module: nn.Module, shape: SpanShape) -> None:
        super().__init__(shape)
        self._module = module

    def run(self, given: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        y: Tensor = self._module(given[0][None])[0]
        return [y]


def module_spans(model: nn.Module, linears: Collection[str], like: Tensor) -> list[BaseSpan]:
    """The largest modules that have two or more of these frozen linears, no other tensor, and outputs that
    depend on the same row of their one input alone. They are found by their contents, and by trying them with
    rows of the type and on the device of `like`."""
    found: list[BaseSpan] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{span.shape.path}.") for span in found):
            continue
        own = linears_of(path, module)
        if len(own) < 2 or not set(own) <= set(linears) or _has_tensors(module):
            continue
        if (shape := _shape(path, module, own, like)) is not None:
            span = _ModuleSpan(module, shape)
            found += [span] if passes_trial(span, like) else []
    return found[:MOST_SPANS]


@torch.no_grad()
def _shape(
    path: str, module: nn.Module, linears: Mapping[str, FrozenLinear], like: Tensor
) -> SpanShape | None:
    """The shape of a module that takes rows alone; None for others."""
    inputs = next(iter(linears.values())).in_features
    try:
        y = module(like.new_zeros(1, 1, inputs))
    except Exception:  # it takes other arguments
        return None
    if not isinstance(y, Tensor) or y.shape[:-1] != (1, 1):
        return None
    return SpanShape("module", path, (inputs,), (y.shape[-1],), tuple(linears))


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


def digest_beside(layer: nn.Module) -> str:
    """Content hash of a layer's parameters that are no frozen linears', such as norms."""
    return digest_of(contents_of(dict(layer.named_parameters())))


def is_close(found: Tensor, wanted: Tensor, apart: float = _APART) -> bool:
    """Tells whether these are the same numbers up to rounding; False for numbers that are not finite."""
    found, wanted = found.float(), wanted.float()
    return bool((found - wanted).norm() <= apart * wanted.norm())


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
