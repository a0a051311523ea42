"""Freivalds' check of exact products (1977): for secret random r and v = r W, known beforehand, the answer y
to an input x has r y = v x.

A wrong answer passes with a probability of at most 2**-46: the check is made with two random r of 23 bits for
each output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.split.messages import LinearCall
from coserve.split.privacy.field import joined_product, product, split_element, total, uniform_weights

_TIMES: Final = 2
_PARTS: Final = 3 * _TIMES  # of the rows of an r W


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
