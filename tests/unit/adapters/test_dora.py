"""DoRA's norms: from what a placement offers, precise in short types, once for each version."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve.adapters.bypass import Dense, SequentialBypass, Side
from coserve.adapters.dora import MAGNITUDE, DoRABypass, Norms
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.sites import DenseWeights
from coserve.kernels.dropout import Mask
from coserve.model.placement import place_locally

ROWS, INPUTS, OUTPUTS, RANK = 5, 48, 40, 3


class Counting:
    """`Weights` that count what they are asked for, and have no dense weight to give."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._whole = DenseWeights(Dense(weight, bias))
        self.bias = bias
        self.norms = self.products = 0

    def row_norms(self) -> Tensor:
        self.norms += 1
        return self._whole.row_norms()

    def forward(self, x: Tensor) -> Tensor:
        self.products += 1
        return self._whole.forward(x)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make(
    dtype: torch.dtype = torch.float64, bias: float = 1.0, size: float = 0.2
) -> tuple[DoRABypass, Counting]:
    weights = Counting(
        drawn(OUTPUTS, INPUTS, seed=1, dtype=dtype), bias * drawn(OUTPUTS, seed=2, dtype=dtype)
    )
    lora = LoRABypass(
        size * drawn(RANK, INPUTS, seed=3, dtype=dtype), drawn(OUTPUTS, RANK, seed=4, dtype=dtype), 0.7
    )
    return DoRABypass.of(lora, 1 + drawn(OUTPUTS, seed=5, dtype=dtype).abs(), weights), weights


def exact_norms(bypass: DoRABypass, dtype: torch.dtype = torch.float64) -> Tensor:
    whole = drawn(OUTPUTS, INPUTS, seed=1, dtype=dtype).double()
    return (whole + bypass.lora.scale * bypass.lora.b.double() @ bypass.lora.a.double()).norm(dim=1)


@pytest.mark.parametrize("size", [0.2, 1e-9, 0.0, 300.0])
def test_norms_are_those_of_the_sum(size: float) -> None:
    bypass, _ = make(size=size)
    assert torch.allclose(bypass.norms.values, exact_norms(bypass), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("bias", [1.0, 300.0])
@pytest.mark.parametrize("size", [0.05, 0.5])
def test_a_large_bias_takes_nothing_from_the_norms(
    dtype: torch.dtype, bound: float, bias: float, size: float
) -> None:
    bypass, _ = make(dtype, bias, size)
    packed = place_locally(drawn(OUTPUTS, INPUTS, seed=1, dtype=dtype), bypass.norms.weights.bias)
    wanted = exact_norms(bypass, dtype)
    for norms in (bypass.norms, Norms(packed, bypass.lora)):
        assert norms.values.dtype == torch.float32
        assert float(((norms.values.double() - wanted) / wanted).abs().max()) <= bound


def test_norms_are_computed_once_for_a_version() -> None:
    bypass, weights = make()
    x, y = drawn(ROWS, INPUTS, seed=6), drawn(ROWS, OUTPUTS, seed=7)
    for _ in range(3):
        bypass.add_(x, y.clone())
        bypass.add(x, y)
        bypass.dropping(Mask(0.5, "key", 0)).add(x, y)
    assert weights.norms == weights.products == 1
    other = bypass.with_parameters({**bypass.parameters(), "lora_B": bypass.lora.b * 2})
    assert weights.norms == 1, "nobody has asked yet"
    assert torch.allclose(other.norms.values, exact_norms(other)) and weights.norms == 2


def test_in_place_and_in_a_graph_are_the_same() -> None:
    bypass, weights = make()
    x = drawn(ROWS, INPUTS, seed=6)
    y = weights.forward(x)
    wanted = (
        x @ bypass.merged(Dense(drawn(OUTPUTS, INPUTS, seed=1), None), Side.OUTPUT).weight.t() + weights.bias
    )
    bypass.add_(x, after := y.clone())
    assert torch.allclose(bypass.add(x, y), wanted) and torch.allclose(after, wanted)
    assert not torch.allclose(y, wanted)


def test_the_norm_is_a_constant_in_gradients() -> None:
    bypass, weights = make()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in bypass.parameters().items()}
    x = drawn(ROWS, INPUTS, seed=6)
    y = weights.forward(x)
    bypass.with_parameters(leaves).add(x, y).sum().backward()
    low = leaves["lora_B"].detach() @ leaves["lora_A"].detach()
    per_magnitude = ((y - weights.bias) + 0.7 * x @ low.t()).sum(0) / exact_norms(bypass)
    assert torch.allclose(leaves[MAGNITUDE].grad, per_magnitude)
    gain = bypass.magnitude / exact_norms(bypass)
    wanted = 0.7 * gain[:, None] * (x @ leaves["lora_A"].detach().t()).sum(0)
    assert torch.allclose(leaves["lora_B"].grad, wanted)


def test_the_magnitude_stays_exact() -> None:
    """In bfloat16 it could not be told from the norm it began as."""
    bypass, _ = make(torch.float32)
    short = bypass.in_type(torch.bfloat16)
    assert torch.equal(short.magnitude, bypass.magnitude) and short.lora.b.dtype == torch.bfloat16
    assert torch.equal(short.norms.lora.a, bypass.lora.a.bfloat16())
    whole = short.in_type(torch.float64)
    assert {tensor.dtype for tensor in whole.parameters().values()} == {torch.float64}


def test_dropout_reaches_the_low_rank_part_alone() -> None:
    bypass, weights = make()
    x, mask = drawn(ROWS, INPUTS, seed=6), Mask(0.5, "key", 0)
    y = weights.forward(x)
    both = bypass.dropping(mask).add(x, y) - bypass.add(x, y)
    gain = bypass.magnitude / exact_norms(bypass)
    assert torch.allclose(both, gain * 0.7 * ((mask(x) - x) @ bypass.lora.a.t() @ bypass.lora.b.t()))


def test_a_trained_bias_comes_after() -> None:
    """The rows' lengths change the product, never the bias; dropout passes through the chain."""
    bypass, weights = make()
    bias = BitFitBypass(drawn(OUTPUTS, seed=8), weights.bias)
    chain = SequentialBypass((replace(bypass, dropout=0.5), bias), 0.5)
    assert chain.parameters().keys() == {"lora_A", "lora_B", MAGNITUDE, "bias"}
    again = chain.with_parameters(chain.parameters())
    x = drawn(ROWS, INPUTS, seed=6)
    y = weights.forward(x)
    merged = again.merged(Dense(drawn(OUTPUTS, INPUTS, seed=1), weights.bias), Side.OUTPUT)
    assert merged.bias is not None
    wanted = x @ merged.weight.t() + merged.bias
    again.add_(x, after := y.clone())
    assert torch.allclose(again.add(x, y), wanted) and torch.allclose(after, wanted)
    mask = Mask(0.5, "key", 0)
    assert torch.allclose(again.dropping(mask).add(x, y), bias.add(x, bypass.dropping(mask).add(x, y)))
