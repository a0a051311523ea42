"""Linears and spans of a base executor, as a client calls them: rows are cut into calls."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from coserve.model.group import Group
from coserve.split.calls import Answer, Calls
from coserve.split.connection import call_of
from coserve.split.messages import (
    ITEM_BYTES,
    MOST_PATHS,
    PRODUCTS_OF_LAYER,
    BaseHello,
    Direction,
    GroupShape,
    SpanShape,
)
from coserve.split.payload import DTYPES
from coserve.split.spans import pieces

# Bytes of a call's tensors, either way. A head's rows x vocabulary come once a step: in one call, those of
# eight training clients that wait for their turn took 140 MB of shared memory. Smaller pieces would be
# computed more slowly: 8 MiB are 64 rows of a vocabulary of 32,000 in float32.
PIECE: Final = 8 << 20


class RemoteGroup(Group):
    """Linears of a base executor with the same input."""

    def __init__(self, calls: Calls, shape: GroupShape) -> None:
        self._calls, self._inputs, self.outputs = calls, shape.inputs, shape.outputs

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> "_ConvertedAnswer":
        widths = [self.outputs[path] for path in paths]
        return _launch(self._calls, "forward", [x], paths, widths, is_training)

    def launch_backward(self, grads: Mapping[str, Tensor]) -> "_First":
        given = list(grads.values())
        return _First(_launch(self._calls, "backward", given, list(grads), [self._inputs], True))


class RemoteSpan:
    """A span of a base executor, by itself or with layers that follow it."""

    def __init__(self, calls: Calls, shape: SpanShape) -> None:
        self.shape, self._calls = shape, calls
        self._most = calls.base.limits.rows // PRODUCTS_OF_LAYER  # rows of a layer

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, around a layer."""
        return min(self.shape.longest, self._most)

    def most_layers(self, lengths: Sequence[int]) -> int:
        """Most layers of one call for sequences of these lengths; longer ones allow fewer."""
        return min(MOST_PATHS, max(1, self._most // max(lengths)))

    def forward(
        self,
        given: Sequence[Tensor],
        is_training: bool = False,
        paths: Sequence[str] = (),
        lengths: Sequence[int] = (),
    ) -> list[Tensor]:
        """The tensors [..., width] at the second cut for those at the first; `paths` are those of this span
        and of layers behind it, this span alone where there are none. In a graph `given` alone is kept, and
        the span is computed anew on the way back."""
        own = paths or (self.shape.path,)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return list(_Anew.apply(self, own, lengths, *given))  # type: ignore[no-untyped-call]
        return self.run("forward", given, is_training, own, lengths)

    def run(
        self,
        direction: Direction,
        given: Sequence[Tensor],
        is_training: bool,
        paths: Sequence[str],
        lengths: Sequence[int],
    ) -> list[Tensor]:
        """Outputs; or gradients of inputs, given these and those of outputs."""
        widths = self.shape.outputs if direction == "forward" else self.shape.inputs
        return _launch(self._calls, direction, given, paths, widths, is_training, lengths).result()


class _Anew(torch.autograd.Function):
    """Spans in a graph."""

    @staticmethod
    def forward(
        ctx: Any, span: RemoteSpan, paths: Sequence[str], lengths: Sequence[int], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*given)
        ctx.call = span, paths, lengths
        return tuple(span.run("forward", given, True, paths, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        span, paths, lengths = ctx.call
        found = span.run("backward", [*ctx.saved_tensors, *grads], True, paths, lengths)
        return None, None, None, *found


def _launch(
    calls: Calls,
    direction: Direction,
    given: Sequence[Tensor],
    paths: Sequence[str],
    widths: Sequence[int],
    is_training: bool,
    lengths: Sequence[int] = (),
) -> "_ConvertedAnswer":
    """Starts a call with these tensors [..., width], for an answer of tensors [..., width] for each of
    `widths`: cut to the rows that an executor takes at once, and to pieces of `PIECE` bytes either way."""
    base, work = calls.base, "training" if is_training else "inference"
    rows = [as_sent(tensor, base) for tensor in given]
    widest = max(sum(tensor.shape[1] for tensor in rows), sum(widths))
    most = min(base.limits.payload, PIECE) // (widest * ITEM_BYTES[base.dtype])
    load = PRODUCTS_OF_LAYER * len(paths) if lengths else 1
    cut = list(pieces(len(rows[0]), lengths, max(1, min(base.limits.rows // load, most))))
    parts: list[Sequence[Tensor]] = [[tensor] for tensor in rows]
    if len(cut) != 1:
        parts = [torch.split(tensor, [count for count, _ in cut]) for tensor in rows]
    answers = [
        calls.submit(
            call_of(paths, part, base.dtype, direction=direction, work=work, lengths=own), part, widths
        )
        for (_, own), part in zip(cut, zip(*parts, strict=True), strict=True)
    ]
    return _ConvertedAnswer(answers, given[0], widths)


def as_sent(tensor: Tensor, base: BaseHello) -> Tensor:
    """[..., width] to [rows, width] of the base's type."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    return flat.to("cpu", DTYPES[base.dtype]).contiguous()


class _ConvertedAnswer:
    """Tensors [..., width] for each width, of the type and on the device of `like` [..., any]."""

    def __init__(self, answers: Sequence[Answer], like: Tensor, widths: Sequence[int]) -> None:
        self._answers, self._widths = answers, widths
        self._rows, self._dtype, self._device = like.shape[:-1], like.dtype, like.device

    def result(self) -> list[Tensor]:
        parts = [answer.result() for answer in self._answers]
        if not parts:  # no rows
            return [
                torch.empty(*self._rows, width, dtype=self._dtype, device=self._device)
                for width in self._widths
            ]
        whole = parts[0] if len(parts) == 1 else [torch.cat(part) for part in zip(*parts, strict=True)]
        return [tensor.to(self._device, self._dtype).view(*self._rows, -1) for tensor in whole]


class _First:
    def __init__(self, answer: _ConvertedAnswer) -> None:
        self._answer = answer

    def result(self) -> Tensor:
        return self._answer.result()[0]
