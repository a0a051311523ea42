"""Positions that reach the modules that would count rows themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.adapters.sites import decoder_of
from coserve.model.told_positions import can_be_told, hand_positions
from coserve_benchmarks.models import shrunk


@pytest.mark.parametrize(
    ("name", "embedding", "behind"), [("bart", "embed_positions", 2), ("roberta", "position_embeddings", 2)]
)
@torch.no_grad()
def test_embeddings_of_positions_are_told(name: str, embedding: str, behind: int) -> None:
    """Rows of two texts side by side; a forward that is told nothing counts from 0 as ever. Both types have
    two places before position 0."""
    model = shrunk.build(name)
    assert can_be_told(model)
    hand_positions(model)
    found: list[Tensor] = []
    module: Any = next(m for n, m in model.named_modules() if n.endswith(embedding))
    module.register_forward_hook(lambda _, args, out: found.append(out))
    tokens, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[7, 8, 0, 1]])
    for told, wanted in ((positions, positions), (None, torch.arange(4)[None])):
        given = {} if told is None else {"position_ids": told}
        decoder_of(model)(input_ids=tokens, use_cache=False, **given)
        assert torch.equal(found.pop().view(4, -1), module.weight[wanted[0] + behind])


def test_models_that_count_otherwise_are_not_told() -> None:
    assert not can_be_told(shrunk.build("xlnet")) and can_be_told(shrunk.build("mpt"))
