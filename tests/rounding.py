"""Bounds of the error of answers in float32: a few times their oracle's.

Rounding depends on the model, its adapter, the size of its logits and the machine's kernels. An oracle in
float32 (transformers' model, PEFT's adapter) does the same arithmetic in another order, so its own distance
from its float64 answers is the measure of the distance allowed. A wrong row, scale or position
is 1,000 times as far and more.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from models import Exact

# Ours to the oracle's, each the largest of some hundred values: 1.0 in the median, 1.4 in one case of ten and
# 2.7 at most, of some 420 single adapters over four architectures, and of mixed engines over 50 times.
SLACK = 4.0


def allowed(theirs: Tensor, exact: Tensor) -> float:
    """The largest error that float32 may have beside `exact`, where the oracle's answers are `theirs`: both
    [rows, vocabulary]. Of few values one may be exact by luck, so that it is a rounding of the largest at
    the least."""
    least = torch.finfo(torch.float32).eps * float(exact.abs().max())
    return SLACK * max(error(theirs, exact), least)


def error(found: Tensor, exact: Tensor) -> float:
    """The largest difference, of any value."""
    return float((found.double() - exact).abs().max())


def largest(errors: Iterable[float]) -> float:
    """Of some errors; one that is no number is infinite, where `max` would pass over it."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def both_ways(oracle: Any, answer: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """A float32 oracle's answers, and the same without rounding: in float64 throughout, with the same
    weights."""
    theirs = answer(oracle).detach()
    oracle.double()
    try:
        with Exact():
            exact = answer(oracle).detach()
    finally:
        oracle.float()
    assert theirs.dtype == torch.float32 and exact.dtype == torch.float64
    return theirs, exact
