"""Linears and spans of a base executor, as a client calls them: rows are cut into calls."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coserve.model.group import Group
from coserve.split.calls import Answer, Calls
from coserve.split.connection import call_of
from coserve.split.messages import ITEM_BYTES, Direction, GroupShape, SpanShape
from coserve.split.payload import DTYPES


class RemoteGroup(Group):
    """Linears of a base executor with the same input."""

    def __init__(self, calls: Calls, shape: GroupShape) -> None:
        self._inputs, self.outputs = shape.inputs, shape.outputs
        self._cut = _CutCalls(calls, max(shape.inputs, sum(shape.outputs.values())))

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> "_Answer":
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


class _CutCalls:
    """Calls that are cut to what an executor takes at once."""

    def __init__(self, calls: Calls, widest: int) -> None:
        """`widest` is how many numbers of a row cross one way at most."""
        self._calls, base = calls, calls.base
        payload = base.limits.payload // (widest * ITEM_BYTES[base.dtype])
        self._most_rows = max(1, min(base.limits.rows, payload))

    def launch(
        self,
        direction: Direction,
        given: Sequence[Tensor],
        paths: Sequence[str],
        widths: Sequence[int],
        is_training: bool,
    ) -> "_Answer":
        """Starts a call with these tensors [..., width], for an answer of tensors [..., width] for each of
        `widths`."""
        base, work = self._calls.base, "training" if is_training else "inference"
        like = given[0]
        rows = [self._rows(tensor) for tensor in given]
        parts: list[Sequence[Tensor]] = [[tensor] for tensor in rows] if len(rows[0]) else []
        if len(rows[0]) > self._most_rows:
            parts = [torch.split(tensor, self._most_rows) for tensor in rows]
        answers = [
            self._calls.submit(call_of(paths, part, base.dtype, direction=direction, work=work), part, widths)
            for part in zip(*parts, strict=True)
        ]
        return _Answer(answers, like, widths)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[..., width] to [rows, width], as it is sent."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        return flat.to("cpu", DTYPES[self._calls.base.dtype]).contiguous()


class _Answer:
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
    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    def result(self) -> Tensor:
        return self._answer.result()[0]
