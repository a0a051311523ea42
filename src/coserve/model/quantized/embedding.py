"""The input embedding in eight bits: rows are dequantized on lookup."""

import torch
from torch import Tensor, nn

from coserve.model.placement import Placed
from coserve.model.quantized.int8 import Int8Placement


class QuantizedEmbedding(Placed):
    """Replaces an embedding of the base; a tied head shares its `placement`."""

    placement: Int8Placement

    def __init__(self, placement: Int8Placement, factor: float) -> None:
        super().__init__()
        self.placement = placement
        self._factor = factor

    @property
    def weight(self) -> Tensor:
        """The dense weight [vocabulary, width], without the factor."""
        return self.placement.weight()

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.placement.rows(tokens)
        return rows if self._factor == 1.0 else rows * self._factor


@torch.no_grad()
def is_lookup(embedding: nn.Module, factor: float) -> bool:
    """Tells by a trial whether an embedding gives rows of its weight times `factor` and nothing else."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    tokens = torch.arange(min(4, len(weight)), device=weight.device)
    return torch.equal(embedding(tokens), weight[tokens] * factor)
