"""Additive secret shares: two executors that do not tell each other see uniformly random numbers.

Rows become elements of a prime field (`field.py`). One executor gets a random element for each, the other one
the difference; products are linear, so the sum of both answers is the answer. It is exact, which makes its
check exact too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from coserve.errors import AdapterMismatch, CoserveError, Unreachable, UnsupportedModel, WrongAnswer
from coserve.split.calls import Answer, Calls
from coserve.split.connection import Rows, call_of
from coserve.split.messages import (
    ITEM_BYTES,
    BaseHello,
    Direction,
    GroupShape,
    LinearCall,
    differences,
)
from coserve.split.payload import DTYPES
from coserve.split.privacy.field import (
    difference,
    joined_product,
    product,
    split_element,
    to_elements,
    to_float,
    total,
    uniform,
    uniform_weights,
)

_TIMES: Final = 2
_PARTS: Final = 3 * _TIMES  # of the rows of an r W
_WORK: Final = "training"  # the class of calls that prepare others


@dataclass(frozen=True, slots=True)
class Factors:
    """The secret factors for one group: of its outputs, [2, out] by path, and of its input, [2, in]."""

    outputs: Mapping[str, Tensor]
    inputs: Tensor

    @staticmethod
    def drawn(inputs: int, outputs: Mapping[str, int]) -> "Factors":
        """Factors for these widths, drawn from the system's random generator."""
        return Factors(
            {path: uniform_weights(_TIMES, width) for path, width in outputs.items()},
            uniform_weights(_TIMES, inputs),
        )


class Checks:
    """The checks of one group's answers."""

    def __init__(
        self, factors: Factors, forward: Mapping[str, Tensor], backward: Mapping[str, Tensor]
    ) -> None:
        """`forward` are the factors of the outputs times the weight, elements [2, in] by path; `backward` the
        weight times those of the input, [2, out]."""
        self._factors = factors
        self._forward = {path: split_element(known) for path, known in forward.items()}
        self._backward = {path: split_element(known) for path, known in backward.items()}

    def hold(self, call: LinearCall, given: Sequence[Tensor], answer: Sequence[Tensor]) -> bool:
        """Tells whether the answer to a call with these elements, each [rows, width], is the product."""
        if call.direction == "forward":
            known = torch.cat([self._forward[path] for path in call.paths])
            expected = torch.split(product(given[0], known), _PARTS, 1)
            return all(
                torch.equal(product(part, self._factors.outputs[path]), joined_product(wanted))
                for path, part, wanted in zip(call.paths, answer, expected, strict=True)
            )
        terms = [
            joined_product(product(part, self._backward[path]))
            for path, part in zip(call.paths, given, strict=True)
        ]
        return torch.equal(product(answer[0], self._factors.inputs), total(terms))


class SharedCalls:
    """Calls of two executors, each of which sees one share of every row, in both directions."""

    def __init__(self, calls: Sequence[Calls], names: Sequence[str], timeout: float) -> None:
        """`names` are the executors' in errors; one that has not answered after `timeout` seconds is given
        up. Requests biases and the facts for checks from both: a pass over all weights, and another one for
        each linear's transpose. Raises AdapterMismatch where they have different bases, UnsupportedModel for
        weights that are not finite, and the errors of calls."""
        self._pair = _Pair(calls, names, timeout)
        self.base = _common_base([found.base for found in calls], names)
        self._exponents = {path: s for group in self.base.groups for path, s in group.exponents.items()}
        self._dtype = DTYPES[self.base.dtype]
        asked = [_Secrets(self._pair, self.base, group) for group in self.base.groups]
        self._checks: dict[str, Checks] = {}
        self._biases: dict[str, Tensor] = {}
        for secrets in asked:
            self._biases |= secrets.biases()
            self._checks |= dict.fromkeys(secrets.paths, secrets.checks())

    def __deepcopy__(self, memo: Mapping[int, object]) -> "SharedCalls":
        return self  # copies of a model are clients of the same executors

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> "_SharedRows":
        """Sends each executor its share of a call."""
        paths, is_forward = call.paths, call.direction == "forward"
        if is_forward:
            elements, scale = to_elements(rows)
            scales = [scale * 2.0 ** -self._exponents[path] for path in paths]
        else:  # the terms of one sum need one scale
            powers = [2.0 ** -self._exponents[path] for path in paths]
            wide = [part.double() * power for part, power in zip(rows, powers, strict=True)]
            elements, scale = to_elements(wide)
            scales = [scale]
        biases = [self._biases[path] for path in paths] if is_forward else None
        shared = self._pair.submit(call, elements, widths, self._checks[paths[0]])
        return _SharedRows(shared, scales, biases, self._dtype)

    def close(self) -> None:
        """Ends both connections."""
        self._pair.close()


class _SharedRows:
    """The answer to a call as rows of the base's type."""

    def __init__(
        self,
        shared: "_SharedAnswer",
        scales: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        dtype: torch.dtype,
    ) -> None:
        self._shared, self._scales, self._biases, self._dtype = shared, scales, biases, dtype

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Raises WrongAnswer, and what calls raise."""
        elements = self._shared.result(timeout)
        rows = [to_float(part) * scale for part, scale in zip(elements, self._scales, strict=True)]
        if self._biases is not None:
            rows = [row + bias for row, bias in zip(rows, self._biases, strict=True)]
        return [row.to(self._dtype) for row in rows]


class _Pair:
    """Two executors and their names."""

    def __init__(self, calls: Sequence[Calls], names: Sequence[str], timeout: float) -> None:
        self._calls, self.names, self._timeout = tuple(calls), tuple(names), timeout

    def submit(
        self, call: LinearCall, elements: Sequence[Tensor], widths: Sequence[int], checks: Checks | None
    ) -> "_SharedAnswer":
        """Starts a call on shares of elements, each [rows, width]; its answer is checked where there are
        checks."""
        elements = tuple(elements)
        masks = [uniform(*part.shape) for part in elements]
        shares = [difference(part, mask) for part, mask in zip(elements, masks, strict=True)]
        call = msgspec.structs.replace(call, dtype="field", nbytes=sum(mask.nbytes for mask in masks))
        return _SharedAnswer(
            self.same(call, (shares, masks), widths), call, elements, (shares, masks), checks
        )

    def same(self, call: LinearCall, rows: Sequence[Rows], widths: Sequence[int]) -> "_Both":
        """Starts a call at each executor, with rows of its own."""
        answers = [found.submit(call, own, widths) for found, own in zip(self._calls, rows, strict=True)]
        return _Both(answers, self.names, self._timeout)

    def close(self) -> None:
        for calls in self._calls:
            calls.close()


class _Both:
    """The answers of both executors to one call."""

    def __init__(self, answers: Sequence[Answer], names: Sequence[str], timeout: float) -> None:
        self.names, self._answers, self._timeout = names, answers, timeout

    def result(self, timeout: float | None = None) -> list[list[Tensor]]:
        """Each executor's tensors. Raises what a call raises, with the executor's name."""
        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        return [self._of(name, answer, limit) for name, answer in zip(self.names, self._answers, strict=True)]

    def _of(self, name: str, answer: Answer, limit: float) -> list[Tensor]:
        try:
            return answer.result(limit)
        except TimeoutError as error:
            raise Unreachable(f"the executor at {name} has not answered within {limit:g} s") from error
        except CoserveError as error:
            raise type(error)(f"of the two executors, the one at {name}: {error}") from error


class _SharedAnswer:
    """The answer to a call on shares: elements, each [rows, width]."""

    def __init__(
        self,
        both: _Both,
        call: LinearCall,
        elements: Sequence[Tensor],
        shares: Sequence[Rows],
        checks: Checks | None,
    ) -> None:
        self._both, self._call, self._checks = both, call, checks
        self._elements, self._shares = elements, shares

    def result(self, timeout: float | None = None) -> list[Tensor]:
        """Raises WrongAnswer, and what calls raise."""
        answers = self._both.result(timeout)
        whole = [total(terms) for terms in zip(*answers, strict=True)]
        if self._checks is not None and not self._checks.hold(self._call, self._elements, whole):
            raise WrongAnswer(_blamed(self._call, self._wrong(self._checks, answers)))
        return whole

    def _wrong(self, checks: Checks, answers: Sequence[Sequence[Tensor]]) -> list[str]:
        """Names the executors whose own answer is wrong."""
        found = []
        for name, share, answer in zip(self._both.names, self._shares, answers, strict=True):
            if not checks.hold(self._call, share, [total([part]) for part in answer]):
                found.append(name)
        return found


class _Secrets:
    """Facts of one group that a client needs, asked of both executors.

    Each sees shares of the secret factors, so neither knows what its answers will be multiplied by. Where one
    of them answers wrongly here, or has other weights than its peer, no later check of either holds.
    """

    def __init__(self, pair: _Pair, base: BaseHello, group: GroupShape) -> None:
        self.paths = tuple(group.outputs)
        self._names = pair.names
        widths = list(group.outputs.values())
        zero = [torch.zeros(1, group.inputs, dtype=DTYPES[base.dtype])]
        self._biases = pair.same(_call(base, self.paths, zero, "forward"), (zero, zero), widths)
        self._factors = Factors.drawn(group.inputs, group.outputs)
        self._forward = {}
        for path, factor in self._factors.outputs.items():
            given = [factor.long()]
            call = _call(base, [path], given, "backward")
            self._forward[path] = pair.submit(call, given, [group.inputs], None)
        given = [self._factors.inputs.long()]
        self._backward = pair.submit(_call(base, self.paths, given, "forward"), given, widths, None)

    def biases(self) -> dict[str, Tensor]:
        """[out] by path, float64. Raises AdapterMismatch where they differ, and what calls raise."""
        first, second = self._biases.result()
        for path, bias, other in zip(self.paths, first, second, strict=True):
            if not torch.equal(bias, other):
                where = " and ".join(self._names)
                raise AdapterMismatch(f"the executors at {where} have different biases at {path}")
        return {path: bias[0].double() for path, bias in zip(self.paths, first, strict=True)}

    def checks(self) -> Checks:
        """Raises the errors of calls."""
        forward = {path: answer.result()[0] for path, answer in self._forward.items()}
        return Checks(self._factors, forward, dict(zip(self.paths, self._backward.result(), strict=True)))


def _call(base: BaseHello, paths: Sequence[str], rows: Rows, direction: Direction) -> LinearCall:
    return call_of(paths, rows, base.dtype, direction=direction, work=_WORK)


def _common_base(bases: Sequence[BaseHello], names: Sequence[str]) -> BaseHello:
    """Offers of both. Raises AdapterMismatch, UnsupportedModel."""
    first, second = bases
    linears = [msgspec.structs.replace(base.of_linears(), shard=None) for base in bases]
    if said := differences(linears[1], linears[0]):
        raise AdapterMismatch(f"the executor at {names[1]} has another base than that at {names[0]}: {said}")
    for group in first.groups:
        if missing := group.outputs.keys() - group.exponents.keys():
            raise UnsupportedModel(f"{min(missing)} has weights that are not finite, which cannot be shared")
    payload = min(first.limits.payload, second.limits.payload)
    limits = msgspec.structs.replace(
        first.limits,
        rows=min(first.limits.rows, second.limits.rows),
        payload=max(1, payload * ITEM_BYTES[first.dtype] // ITEM_BYTES["field"]),
    )
    return msgspec.structs.replace(first.of_linears(), limits=limits)


def _blamed(call: LinearCall, wrong: Sequence[str]) -> str:
    what = f"the {call.direction} product of {', '.join(call.paths)}"
    if len(wrong) == 1:
        return f"the executor at {wrong[0]} has answered wrongly: {what} is not that of the base's weights"
    return (
        f"{what} is not what the executors at {' and '.join(wrong)} gave when they were first asked: their "
        f"weights differ or have changed, or one of them lies"
    )
