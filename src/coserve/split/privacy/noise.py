"""Additive noise with effects computed ahead (Symbiosis, 3.8).

This is obfuscation: the executor has computed the effects, so it has seen every noise value, and can subtract
them. An observer that has not seen them finds them as the means of clusters of rows (docs/privacy.md).
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.split.calls import Answer, Calls
from coserve.split.connection import Rows, call_of
from coserve.split.messages import Direction, LinearCall
from coserve.split.payload import DTYPES

_WORK: Final = "training"  # the class of calls that compute effects


class NoisyCalls:
    """Calls of one executor with noise on every row, in both directions."""

    def __init__(self, calls: Calls, values: int, level: float, uses: int) -> None:
        """Each linear's input and output gradient has `values` noise values, of which each row gets one. They
        are `level` times the width's square root larger than the call's rows; after `uses` calls they are
        replaced. Effects of forward noise are requested now, those of backward noise when first needed.
        Raises the errors of calls."""
        self.base = calls.base.of_linears()  # for linear calls alone the effects of noise can be subtracted
        self._calls, self._level = calls, level
        self._of_input: dict[str, _Noise] = {}
        self._of_output: dict[str, _Noise] = {}
        for group in self.base.groups:
            outputs = group.outputs
            noise = _Noise(calls, "forward", group.inputs, outputs, values, uses)
            self._of_input |= dict.fromkeys(outputs, noise)
            for path, width in outputs.items():
                self._of_output[path] = _Noise(calls, "backward", width, {path: group.inputs}, values, uses)
        for noise in self._of_input.values():
            noise.prepare()

    def __deepcopy__(self, memo: Mapping[int, object]) -> "NoisyCalls":
        return self  # copies of a model are clients of the same executor

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_Denoised":
        """Sends rows with noise."""
        forward = call.direction == "forward"
        paths = call.paths[:1] if forward else call.paths
        noises = [(self._of_input if forward else self._of_output)[path] for path in paths]
        sent = []
        effects: list[list[Tensor]] = []  # of each of the sent tensors, on each of the answer's
        for noise, part in zip(noises, rows, strict=True):
            values, of_values = noise.next()
            chosen = noise.chosen(len(part))
            size = self._level * part.float().norm() / max(1, len(part)) ** 0.5  # a row's norm
            sent.append((part + (size * values[chosen]).to(part.dtype)).contiguous())
            wanted = call.paths if forward else of_values
            effects.append([size * of_values[path][chosen] for path in wanted])
        answer = self._calls.submit(call, sent, widths)
        return _Denoised(answer, [list(terms) for terms in zip(*effects, strict=True)])

    def close(self) -> None:
        """Ends the connection."""
        self._calls.close()


class _Denoised:
    """An answer without the effects of noise, given those on each of its tensors."""

    def __init__(self, answer: Answer, effects: Sequence[Sequence[Tensor]]) -> None:
        self._answer, self._effects = answer, effects

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Raises the errors of the call."""
        rows = self._answer.result(timeout)
        return [
            (part.float() - torch.stack(list(terms)).sum(0)).to(part.dtype)
            for part, terms in zip(rows, self._effects, strict=True)
        ]


class _Noise:
    """The noise values of one input, or of one output's gradient, and their effects."""

    def __init__(
        self,
        calls: Calls,
        direction: Direction,
        width: int,
        outputs: Mapping[str, int],
        values: int,
        uses: int,
    ) -> None:
        self._calls, self._direction, self._width, self._outputs = calls, direction, width, outputs
        self._count, self._uses, self._left = values, uses, 0
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))
        self._lock = threading.Lock()
        self._values = torch.empty(0)
        self._pending: Answer | None = None
        self._effects: dict[str, Tensor] = {}

    def prepare(self) -> None:
        """Asks for the effects of new values, unless that was done and they were not used yet."""
        if self._pending is not None:
            return
        dtype = self._calls.base.dtype
        drawn = torch.randn(self._count, self._width, generator=self._generator).to(DTYPES[dtype])
        rows = [torch.cat([drawn, torch.zeros_like(drawn[:1])])]  # whose product is the bias
        call = call_of(list(self._outputs), rows, dtype, direction=self._direction, work=_WORK)
        self._values = drawn.float()
        self._pending = self._calls.submit(call, rows, list(self._outputs.values()))

    def next(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Values [values, width] and their effects [values, out] by path, for one more call."""
        with self._lock:
            if not self._left:
                self.prepare()
                pending, self._pending = self._pending, None  # a failed one is requested again
                assert pending is not None, "just asked for"
                answers = pending.result()
                effects = [part[:-1].float() - part[-1:].float() for part in answers]
                self._effects = dict(zip(self._outputs, effects, strict=True))
                self._left = self._uses
            self._left -= 1
            return self._values, self._effects

    def chosen(self, rows: int) -> Tensor:
        """The number of a value for each row."""
        with self._lock:
            return torch.randint(self._count, (rows,), generator=self._generator)
