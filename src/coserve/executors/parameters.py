"""The frozen parameters of a base without data, read by commands from an executor with the data."""

from collections.abc import Mapping

from torch import Tensor, nn

from coserve.adapters.bypass import Dense
from coserve.adapters.sites import FrozenParameters, Weights
from coserve.errors import UnsupportedModel
from coserve.executors.executor import EmbedTokens, Executor, ReadParameter
from coserve.model.placement import Offer, Placement


class RemoteParameters(FrozenParameters):
    """Parameters of `executor`'s base; `shapes` are those of the host's base."""

    def __init__(self, executor: Executor, shapes: FrozenParameters) -> None:
        self._executor, self._shapes = executor, shapes

    def weights(self, path: str) -> Weights:
        self._shapes.weights(path)  # which refuses what the placement does not offer
        return _RemoteWeights(path, self._executor)

    def experts(self, path: str) -> nn.Module:
        return self._shapes.experts(path)

    def bias(self, path: str) -> Tensor | None:
        return self._executor.call(ReadParameter(path, "bias"))

    def dense(self, path: str) -> Dense:
        return Dense(_read(self._executor, path, "weight"), self.bias(path))

    def gain(self, path: str) -> Tensor:
        return _read(self._executor, path, "gain")

    def embedded(self, tokens: Tensor) -> Tensor:
        return self._executor.call(EmbedTokens(tuple(tokens.tolist())))

    def rounded(self, path: str, weight: Tensor) -> Tensor:
        return self._shapes.rounded(path, weight)


class ShapedPlacement(Placement):
    """Stands, where there are shapes alone, for a placement that computes elsewhere."""

    offers = frozenset({Offer.BACKWARD})
    is_elsewhere = True

    def __init__(self, placement: Placement) -> None:
        self._placement, self.bias = placement, placement.bias

    def forward(self, x: Tensor) -> Tensor:
        return self._placement.forward(x)

    def backward(self, grad: Tensor) -> Tensor:
        return self._placement.backward(grad)

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


class _RemoteWeights:
    def __init__(self, path: str, executor: Executor) -> None:
        self._path, self._executor = path, executor

    @property
    def bias(self) -> Tensor | None:
        return self._executor.call(ReadParameter(self._path, "bias"))

    def row_norms(self) -> Tensor:
        return _read(self._executor, self._path, "row_norms")

    def forward(self, x: Tensor) -> Tensor:
        raise UnsupportedModel(f"{self._path} is computed by the executor alone")


def _read(executor: Executor, path: str, what: str) -> Tensor:
    found = executor.call(ReadParameter(path, what))
    assert found is not None, f"{path} has a {what}"
    return found
