"""Exact products of a weight and elements of a prime field, as float64 products of parts.

A weight is multiplied by a power of two and rounded to integers of 23 bits and a sign. An element of the
field has 57 bits: three parts of 19. A product of a part and 2048 weights is a sum of integers below 2**53,
which float64 has exactly, whatever the order of its terms.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

PRIME: Final = (1 << 57) - 13
WEIGHT_BITS: Final = 23
_BITS: Final = 57
_PART: Final = 19  # bits
_PART_MASK: Final = (1 << _PART) - 1
_MOST_TERMS: Final = 1 << (53 - _PART - WEIGHT_BITS)
_ROWS: Final = 512  # computed at once, for this many outputs: 64 MiB of weights, three times 48 of products
_OUTPUTS: Final = 4096


def exponent_of(weight: Tensor) -> int | None:
    """The power of two that brings a weight to 23 bits; None for one that is not finite."""
    low, high = torch.aminmax(weight.detach())  # NaN where there is any
    largest = max(abs(float(low)), abs(float(high)))
    return WEIGHT_BITS - math.frexp(largest)[1] if math.isfinite(float(low) - float(high)) else None


def exponents_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """`exponent_of` each, of those that have one."""
    found = {path: exponent_of(weight) for path, weight in weights.items()}
    return {path: exponent for path, exponent in found.items() if exponent is not None}


def product(x: Tensor, weight: Tensor, exponent: int = 0) -> Tensor:
    """x [rows, in] times the rounded `weight` [out, in] * 2**exponent, int64 elements [rows, out].

    `weight` times the power must be at most 2**23 in magnitude. Bits of x above the 57th are ignored.
    """
    whole = x.new_empty(len(x), len(weight))
    for some, rows in zip(torch.split(whole, _ROWS), torch.split(x, _ROWS), strict=True):
        parts = split_element(rows)
        for place, own in zip(torch.split(some, _OUTPUTS, 1), torch.split(weight, _OUTPUTS), strict=True):
            place.copy_(_joined(_sums(parts, own, exponent)))
    return whole


def _sums(parts: Tensor, weight: Tensor, exponent: int) -> Tensor:
    """[rows, in] to [rows, out]: integers below 2**62 for up to 2**20 inputs."""
    sums: Tensor | None = None
    for terms, own in zip(
        torch.split(parts, _MOST_TERMS, 1), torch.split(weight, _MOST_TERMS, 1), strict=True
    ):
        term = (terms @ own.double().mul_(2.0**exponent).round_().t()).long()
        sums = term if sums is None else sums.add_(term)
    assert sums is not None, "linears have inputs"
    return sums


def split_element(x: Tensor) -> Tensor:
    """Elements [n, in] as their highest 19 bits, the middle ones and the lowest, [3 * n, in] in float64. As
    weights for `product` they have results that `joined_product` joins."""
    parts = torch.empty(3 * len(x), x.shape[1], dtype=torch.float64, device=x.device)
    for number, part in enumerate(parts.chunk(3)):
        part.copy_((x >> (2 - number) * _PART) & _PART_MASK)
    return parts


def _joined(sums: Tensor) -> Tensor:
    """The elements of which `sums` [3 * rows, out] has the highest, middle and lowest parts."""
    high, middle, low = sums.remainder_(PRIME).chunk(3)
    return (_shifted(_shifted(high) + middle) + low).remainder_(PRIME)


def _shifted(x: Tensor) -> Tensor:
    """x * 2**19 modulo the prime, for x from 0 to 2**62; the result is below 2**58. 2**57 is 13 here."""
    return ((x & ((1 << _BITS - _PART) - 1)) << _PART) + 13 * (x >> _BITS - _PART)


def joined_product(x: Tensor) -> Tensor:
    """[rows, 3 * n], products with weights from `split_element`, to [rows, n]."""
    return _joined(x.t().contiguous()).t()


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of elements; of a single term, the element that any integers are."""
    first = terms[0].remainder(PRIME)
    for term in terms[1:]:
        first = (first + term).remainder_(PRIME)
    return first


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, of elements."""
    return (a - b).remainder_(PRIME)


def uniform(*shape: int) -> Tensor:
    """Elements from the system's random generator. A generator of torch would not do: much of its numbers can
    be seen in masked values, and its later ones follow from them."""
    count = math.prod(shape)
    drawn = torch.from_numpy(np.frombuffer(os.urandom(8 * count), np.int64) & ((1 << _BITS) - 1))
    while bool((is_over := drawn >= PRIME).any()):  # 13 in 2**57
        drawn[is_over] = uniform(int(is_over.sum()))
    return drawn.view(shape)


def uniform_weights(*shape: int) -> Tensor:
    """Secret factors for `product`, float64 integers of 23 bits."""
    drawn = np.frombuffer(os.urandom(4 * math.prod(shape)), np.int32) & ((1 << WEIGHT_BITS) - 1)
    return torch.from_numpy(drawn).double().view(shape)


def to_elements(parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Rows [rows, width] for each part, rounded to elements of the field, and a power of two [rows, 1] that
    brings each back.

    A row is scaled by its norm over all parts, so that no product with a weight leaves the field: a column or
    row of weights of d values has a norm of at most 2**23 * sqrt(d), and d is the width of all parts. A row
    with a value that is not finite becomes zeros, to be multiplied by NaN.
    """
    wide = [part.double() for part in parts]
    width = sum(part.shape[1] for part in parts)
    norm = torch.stack([part.square().sum(1, keepdim=True) for part in wide]).sum(0).sqrt()
    is_finite = norm.isfinite()
    kept = 32 - math.ceil(math.log2(width) / 2)
    exponents = kept - torch.frexp(torch.where(is_finite, norm, 0.0)).exponent
    elements = []
    for part in wide:
        whole = torch.where(is_finite, torch.ldexp(part, exponents), 0.0).round().long()
        elements.append(torch.where(whole < 0, whole + PRIME, whole))
    return elements, torch.where(is_finite, torch.ldexp(torch.ones_like(norm), -exponents), torch.nan)


def to_float(elements: Tensor) -> Tensor:
    """The numbers nearest to zero that elements are, float64."""
    return torch.where(elements > PRIME // 2, elements - PRIME, elements).double()
