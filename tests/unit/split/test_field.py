"""Products in the field of shares are exact."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from coserve.split.privacy import field

PRIME = field.PRIME


def exact(x: Tensor, weight: Tensor, exponent: int) -> Tensor:
    """The product in Python's integers."""
    whole = (weight.double() * 2.0**exponent).round().long().numpy().astype(object)
    product = (x.numpy().astype(object) @ whole.T) % PRIME
    return torch.from_numpy(product.astype(np.int64))


def test_the_modulus_is_prime() -> None:
    for _ in range(40):
        base = random.randrange(2, PRIME)
        odd, twos = PRIME - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        found = pow(base, odd, PRIME)
        powers = [pow(found, 1 << n, PRIME) for n in range(twos)]
        assert found == 1 or PRIME - 1 in powers


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(3, 1, 2), (2, 7, 5), (3, 2048, 2), (2, 5003, 4100), (1030, 5, 3)]
)
def test_products_are_exact(rows: int, inputs: int, outputs: int) -> None:
    x = field.uniform(rows, inputs)
    weight = torch.randn(outputs, inputs) * 10.0 ** random.uniform(-6, 6)
    exponent = field.exponent_of(weight)
    assert exponent is not None
    assert torch.equal(field.product(x, weight, exponent), exact(x, weight, exponent))


def test_products_of_the_largest_values_are_exact() -> None:
    for value in (0, 1, PRIME - 1, PRIME // 2):
        x = torch.full((2, 4099), value)
        for extreme in (-1.0, 1.0):
            weight = torch.full((3, 4099), extreme * (1 - 2**-24))
            exponent = field.exponent_of(weight)
            assert exponent == 23 and torch.equal(
                field.product(x, weight, exponent), exact(x, weight, exponent)
            )


def test_products_with_elements_as_weights() -> None:
    x, secret = field.uniform(5, 3000), field.uniform(2, 3000)
    got = field.joined_product(field.product(x, field.split_element(secret)))
    wanted = (x.numpy().astype(object) @ secret.numpy().astype(object).T) % PRIME
    assert torch.equal(got, torch.from_numpy(wanted.astype(np.int64)))


@pytest.mark.parametrize("width", [1, 64, 1000, 40_000])
def test_rows_of_any_size_keep_their_digits_and_never_overflow(width: int) -> None:
    rows = torch.randn(6, width) * torch.tensor([1e-30, 1e-5, 1.0, 1e4, 1e30, 0.0])[:, None]
    rows[2, 0] = 1000.0  # an outlier
    (elements,), scale = field.to_elements([rows])
    back = field.to_float(elements) * scale
    step = rows.double().norm(dim=1) * 2.0 ** -(31 - np.ceil(np.log2(width) / 2))
    assert ((back - rows).abs().amax(1) <= step / 2).all()
    worst = torch.full((1, width), 2.0**23)
    reached = (field.to_float(elements).abs() @ worst.double().t()).max()
    assert reached < PRIME // 2


def test_rows_that_are_not_finite_become_nan_alone() -> None:
    rows = torch.randn(4, 8)
    rows[1, 3], rows[2, 0] = torch.nan, torch.inf
    elements, scale = field.to_elements([rows, torch.randn(4, 5)])
    assert scale[:, 0].isfinite().tolist() == [True, False, False, True]
    assert all(bool((part >= 0).all() and (part < PRIME).all()) for part in elements)
    assert field.exponent_of(rows) is None and field.exponent_of(torch.zeros(2, 2)) == 23


def test_masks_are_uniform() -> None:
    drawn = field.uniform(200, 1000)
    assert drawn.min() >= 0 and drawn.max() < PRIME
    counts = torch.bincount((drawn >> 49).flatten(), minlength=256).double()
    chi = float(((counts - 781.25) ** 2 / 781.25).sum())
    assert 255 - 6 * (2 * 255) ** 0.5 < chi < 255 + 6 * (2 * 255) ** 0.5
