"""Tests of compiled kernels in each type of numbers that they are compiled for: a module that imports the
fixture `each_type` has its tests run once for each, in which `numbers` is of that type."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coserve.kernels.native.build import NUMBERS, library


@dataclass(slots=True)
class _Numbers:
    """The type of the test under way."""

    dtype: torch.dtype = torch.bfloat16

    @property
    def is_wide(self) -> bool:
        return self.dtype is torch.float32

    @property
    def has_products(self) -> bool:
        """Tells whether this processor has a kernel of linears."""
        found = library(self.dtype)
        return found is not None and bool(found.panel_outputs())


numbers = _Numbers()


@pytest.fixture(autouse=True, params=NUMBERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def each_type(request: pytest.FixtureRequest) -> Iterator[None]:
    numbers.dtype = request.param
    if library(numbers.dtype) is None:
        pytest.skip("there is no C compiler")
    yield
    numbers.dtype = torch.bfloat16


@pytest.fixture(autouse=True)
def with_products(each_type: None) -> None:
    """For modules in which all tests need a kernel of linears."""
    if not numbers.has_products:
        pytest.skip("there is no kernel of products")


def in_type(x: Tensor) -> Tensor:
    """The tensor in the type of the test under way."""
    return x.to(numbers.dtype)
