"""Modules that stand in a stage for those that other stages have.

The model's own code runs with these in place, and so do the proofs of a base: they show that the stage's own
layers are driven as the model drives them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


class AbsentLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A decoder layer of another stage: it gives what it is given. It has the plain attributes of the `layer`
    in its place, which the model's code may ask for."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if name != "training"})

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class AbsentEnd(nn.Module):
    """Embeddings or the head. `weight` has the shape of that of the `whole` module, and takes no memory."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        assert isinstance(whole.weight, Tensor)
        self.shape, self._dtype = whole.weight.shape, whole.weight.dtype

    @property
    def weight(self) -> Tensor:
        return torch.zeros(1, dtype=self._dtype).expand(self.shape)


class AbsentEmbedding(AbsentEnd):
    """An embedding of the first stage: it gives numbers that depend on the token, which the proofs alone
    read."""

    def forward(self, tokens: Tensor) -> Tensor:
        columns = torch.arange(1, self.shape[1] + 1, device=tokens.device)
        return torch.sin((tokens[..., None] + 1) * columns).to(self._dtype)


class AbsentHead(AbsentEnd):
    """The head of the last stage: as many numbers as it has logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        logits, width = self.shape[0], hidden.shape[-1]
        return hidden.repeat(*[1] * (hidden.ndim - 1), -(-logits // width))[..., :logits]
