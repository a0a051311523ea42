"""Quantized placements: the bytes they hold and the weights they stand for."""

import pytest
import torch
from torch import Tensor

from coserve.model.quantized.embedding import QuantizedEmbedding
from coserve.model.quantized.int8 import Int8Placement
from coserve.model.quantized.nf4 import (
    NF4Placement,
    TiledNF4Placement,
    place_in_nf4,
    tiled,
    untiled,
)

OUT, IN = 96, 128
MAKERS = {"8bit": Int8Placement, "4bit": place_in_nf4, "4bit, plain order": NF4Placement}
# Relative error of normally distributed weights: uniform steps of 1/127 of a row's largest; NF4's levels.
ERRORS = {"8bit": 0.009, "4bit": 0.1, "4bit, plain order": 0.1}
BYTES = {"8bit": OUT * IN + 2 * OUT, "4bit": OUT * IN * 17 // 32, "4bit, plain order": OUT * IN * 17 // 32}


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_are_close_and_small(kind: str) -> None:
    weight = drawn(0, OUT, IN, dtype=torch.bfloat16)
    placement = MAKERS[kind](weight, None)
    assert placement.weight().shape == weight.shape and placement.weight().dtype == torch.bfloat16
    assert 1e-4 < error(placement.weight(), weight) < ERRORS[kind]
    assert placement.nbytes == BYTES[kind]
    with_bias = MAKERS[kind](weight, drawn(1, OUT, dtype=torch.bfloat16))
    assert with_bias.nbytes == BYTES[kind] + 2 * OUT


def test_zeros_and_outliers() -> None:
    weight = drawn(0, OUT, IN)
    weight[3] = 0
    weight[4, 7] = 1000.0
    placement = Int8Placement(weight, None)
    dense = placement.weight()
    assert torch.equal(dense[3], torch.zeros(IN)) and abs(float(dense[4, 7]) - 1000) < 1e-3
    assert error(dense[5:], weight[5:]) < 0.009  # scales are a row's own


@pytest.mark.parametrize("shape", [(3, 5), (40, 40), (33, 96), (64, 100)])
def test_eight_bits_take_any_shape(shape: tuple[int, int]) -> None:
    """torch's product of few rows reads past weights whose inputs do not fill its vectors: not asked then."""
    weight = drawn(0, *shape, dtype=torch.bfloat16)
    placement = Int8Placement(weight, None)
    x = drawn(1, 2, shape[1], dtype=torch.bfloat16)
    assert error(placement.forward(x), x.double() @ placement.weight().double().t()) < 1e-2


def test_large_weights_are_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, grad = drawn(0, OUT, IN), drawn(1, 40, IN), drawn(2, 40, OUT)
    placement = Int8Placement(weight, None)
    in_one = placement.weight(), placement.row_norms(), placement.forward(x), placement.backward(grad)
    assert len(list(placement._pieces(dim=0))) == 1
    monkeypatch.setattr("coserve.model.quantized.int8._PIECE", 10 * IN)
    assert len(list(placement._pieces(dim=0))) == 10 and len(list(placement._pieces(dim=1))) == 10
    assert torch.equal(Int8Placement(weight, None).weight(), in_one[0])
    assert torch.equal(placement.row_norms(), in_one[1])
    assert error(placement.forward(x), in_one[2]) < 1e-6
    assert error(placement.backward(grad), in_one[3]) < 1e-6


def test_tiles_and_back() -> None:
    data = torch.randint(0, 256, (OUT, IN // 2), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(untiled(tiled(data)), data) and not torch.equal(tiled(data), data)


def test_tiles_hold_the_numbers_of_rows() -> None:
    """Another order, the same weights: the placements differ in nothing else."""
    weight = drawn(0, OUT, IN, dtype=torch.bfloat16)
    rows, tiles = NF4Placement(weight, None), TiledNF4Placement(weight, None)
    assert torch.equal(rows.weight(), tiles.weight()) and rows.nbytes == tiles.nbytes
    assert torch.equal(rows.row_norms(), tiles.row_norms())


def test_embedding_looks_up_rows_of_its_placement() -> None:
    weight = drawn(0, 50, IN, dtype=torch.bfloat16)
    embedding = QuantizedEmbedding(Int8Placement(weight, None), factor=8.0)
    tokens = torch.tensor([[3, 3, 49]])
    assert torch.equal(embedding(tokens), 8 * embedding.weight[tokens])
    assert embedding(tokens).dtype == torch.bfloat16 and error(embedding.weight, weight) < 0.009
