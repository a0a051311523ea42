"""The frozen parameters of a base, for uses beside its passes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.bypass import Dense
from coserve.adapters.sites import FrozenParameters, Weights, gain_of
from coserve.core.sequence import Direction
from coserve.model.block import VisitedWeights
from coserve.model.chain import Chain
from coserve.model.experts_hook import ExpertsHook
from coserve.model.linear import FrozenLinear
from coserve.model.placement import Offer, Placed


class HeldParameters(FrozenParameters):
    """Parameters that are read in visits of the model's parts, and used outside of any."""

    def __init__(self, model: PreTrainedModel, chain: Chain, device: torch.device) -> None:
        self._model, self._chain, self._device = model, chain, device

    def weights(self, path: str) -> Weights:
        linear = self._model.get_submodule(path)
        assert isinstance(linear, FrozenLinear)
        linear.placement.expect(Offer.ROW_NORMS, path)
        return VisitedWeights(self._chain.part_of(path), linear.placement)

    def experts(self, path: str) -> nn.Module:
        module = self._model.get_submodule(path)
        return super().experts(path) if ExpertsHook.of(module) is None else module

    def bias(self, path: str) -> Tensor | None:
        return self._outside(path, _bias)

    def dense(self, path: str) -> Dense:
        module = self._model.get_submodule(path)
        if isinstance(module, FrozenLinear):
            module.placement.expect(Offer.WEIGHT, path)
        weight = self._outside(path, lambda module: module.weight)
        assert isinstance(weight, Tensor)
        return Dense(weight.detach(), self.bias(path))

    def gain(self, path: str) -> Tensor:
        gain = self._outside(path, gain_of)
        assert gain is not None
        return gain

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        with self._chain.ends.visit(Direction.INFER):
            found: Tensor = self._model.get_input_embeddings()(tokens.to(self._device))
            return found

    def rounded(self, path: str, weight: Tensor) -> Tensor:
        module = self._model.get_submodule(path)
        return module.placement.rounded(weight) if isinstance(module, Placed) else weight

    def _outside(self, path: str, read: Callable[[nn.Module], Any]) -> Tensor | None:
        """A parameter of the module at `path`, read in a visit, as it may be used outside of any."""
        part = self._chain.part_of(path)
        with part.visit(Direction.INFER):
            found: Tensor | None = read(self._model.get_submodule(path))
            return None if found is None else part.residence.outside(found)


def _bias(module: nn.Module) -> Any:
    return getattr(module.placement if isinstance(module, FrozenLinear) else module, "bias", None)
