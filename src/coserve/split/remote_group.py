"""Linears, spans and slices of a base executor, as a client calls them: rows are cut into calls."""

from collections.abc import Iterator, Mapping, Sequence
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
    BlocksShape,
    Direction,
    GroupShape,
    SliceShape,
    SpanShape,
)
from coserve.split.payload import DTYPES

# Bytes of a call's tensors, either way. A head's rows x vocabulary come once a step: in one call, those of
# eight training clients that wait for their turn took 140 MB of shared memory. Smaller pieces would be
# computed more slowly: 8 MiB are 64 rows of a vocabulary of 32,000 in float32.
PIECE: Final = 8 << 20


class RemoteGroup(Group):
    """Linears of a base executor with the same input."""

    def __init__(self, calls: Calls, shape: GroupShape) -> None:
        self._inputs, self.outputs = shape.inputs, shape.outputs
        self._cut = _CutCalls(calls, max(shape.inputs, sum(shape.outputs.values())))

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> "_ConvertedAnswer":
        widths = [self.outputs[path] for path in paths]
        return self._cut.launch("forward", [x], paths, widths, is_training)

    def launch_backward(self, grads: Mapping[str, Tensor]) -> "_First":
        return _First(self._cut.launch("backward", list(grads.values()), list(grads), [self._inputs], True))


class RemoteSpan:
    """A span of a base executor."""

    def __init__(self, calls: Calls, shape: SpanShape) -> None:
        self.shape = shape
        self._cut = _CutCalls(calls, shape.inputs + shape.outputs)

    def forward(self, x: Tensor, is_training: bool = False) -> Tensor:
        """[..., in] to [..., out]."""
        return self._cut.launch(
            "forward", [x], [self.shape.path], [self.shape.outputs], is_training
        ).result()[0]

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x [..., in], given that of its output [..., out]."""
        return self._cut.launch("backward", [x, grad], [self.shape.path], [self.shape.inputs], True).result()[
            0
        ]


class RemoteSlice:
    """A slice of a base executor."""

    def __init__(self, calls: Calls, shape: SliceShape) -> None:
        self.shape = shape
        self._widths = [shape.width, *shape.following.values()]
        self._cut = _CutCalls(calls, max(shape.width + shape.inputs, sum(self._widths)))

    def forward(self, hidden: Tensor, attended: Tensor, is_training: bool = False) -> list[Tensor]:
        """The layer's output [..., width] and the products [..., out] of the linears that follow, for the
        layer's input [..., width] and the input [..., in] of the linear where attention ends."""
        given = [hidden, attended]
        return self._cut.launch("forward", given, [self.shape.path], self._widths, is_training).result()


class RemoteBlocks:
    """Decoder layers of an executor, for whole sequences."""

    def __init__(self, calls: Calls, shape: BlocksShape) -> None:
        self._calls, self._most = calls, calls.base.limits.rows // PRODUCTS_OF_LAYER  # rows of a layer
        self.shape, self.longest = shape, min(shape.longest, self._most)

    def most_layers(self, lengths: Sequence[int]) -> int:
        """Most layers of one call for sequences of these lengths; longer ones allow fewer."""
        return min(MOST_PATHS, max(1, self._most // max(lengths)))

    def call(self, paths: Sequence[str], x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Outputs of these layers, one after the other, for x [..., width] of sequences of these lengths. In
        a graph only x is kept."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Whole.apply(x, self, tuple(paths), tuple(lengths))  # type: ignore[no-untyped-call]
            return y
        return self.run("forward", paths, [x], lengths, torch.is_grad_enabled())

    def run(
        self,
        direction: Direction,
        paths: Sequence[str],
        given: Sequence[Tensor],
        lengths: Sequence[int],
        is_training: bool,
    ) -> Tensor:
        """Outputs, or gradients of inputs given these and the outputs' [..., width]."""
        base, like = self._calls.base, given[0]
        rows = [as_sent(tensor, base) for tensor in given]
        answers, begin = [], 0
        for part in self._parts(lengths, len(paths)):
            own = [tensor[begin : begin + sum(part)] for tensor in rows]
            begin += sum(part)
            call = call_of(
                paths,
                own,
                base.dtype,
                direction=direction,
                work="training" if is_training else "inference",
                lengths=tuple(part),
            )
            answers.append(self._calls.submit(call, own, [self.shape.width]))
        return _ConvertedAnswer(answers, like, [self.shape.width]).result()[0]

    def _parts(self, lengths: Sequence[int], layers: int) -> Iterator[list[int]]:
        """Sequences of one call each: as many as an executor takes at once."""
        base = self._calls.base
        payload = base.limits.payload // (2 * self.shape.width * ITEM_BYTES[base.dtype])
        most = min(self._most // layers, payload)
        part: list[int] = []
        for length in lengths:
            if part and sum(part) + length > most:
                yield part
                part = []
            part.append(length)
        yield part


class _Whole(torch.autograd.Function):
    """Decoder layers in a graph, computed anew on the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, remote: RemoteBlocks, paths: tuple[str, ...], lengths: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = remote, paths, lengths
        return remote.run("forward", paths, [x], lengths, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        remote, paths, lengths = ctx.call
        return remote.run("backward", paths, [x, grads[0]], lengths, True), None, None, None


class _CutCalls:
    """Calls cut to the rows that an executor takes at once, and to pieces of `PIECE` bytes."""

    def __init__(self, calls: Calls, widest: int) -> None:
        """`widest` is how many numbers of a row cross one way at most."""
        self._calls, base = calls, calls.base
        payload = min(base.limits.payload, PIECE) // (widest * ITEM_BYTES[base.dtype])
        self._most_rows = max(1, min(base.limits.rows, payload))

    def launch(
        self,
        direction: Direction,
        given: Sequence[Tensor],
        paths: Sequence[str],
        widths: Sequence[int],
        is_training: bool,
    ) -> "_ConvertedAnswer":
        """Starts a call with these tensors [..., width], for an answer of tensors [..., width] for each of
        `widths`."""
        base, work = self._calls.base, "training" if is_training else "inference"
        like = given[0]
        rows = [as_sent(tensor, base) for tensor in given]
        parts: list[Sequence[Tensor]] = [[tensor] for tensor in rows] if len(rows[0]) else []
        if len(rows[0]) > self._most_rows:
            parts = [torch.split(tensor, self._most_rows) for tensor in rows]
        answers = [
            self._calls.submit(call_of(paths, part, base.dtype, direction=direction, work=work), part, widths)
            for part in zip(*parts, strict=True)
        ]
        return _ConvertedAnswer(answers, like, widths)


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
