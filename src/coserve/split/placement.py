"""Frozen linears that a base executor computes, for an engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from coserve.errors import AdapterMismatch
from coserve.model.placement import Offer, Placement
from coserve.split.calls import Source
from coserve.split.messages import GroupShape, SpanShape
from coserve.split.payload import DTYPES
from coserve.split.remote_group import RemoteGroup


class EndpointGroup(RemoteGroup):
    """Linears of one source that are given the same input: some of those that it takes in one call."""

    def __init__(self, source: Source, shape: GroupShape, paths: Sequence[str]) -> None:
        super().__init__(source, shape)
        self._source, self._shape = source, shape
        self.outputs = {path: shape.outputs[path] for path in paths}

    def joined(self, others: Sequence[Self]) -> "EndpointGroup | None":
        if any(not isinstance(other, EndpointGroup) or other._shape is not self._shape for other in others):
            return None
        paths = [path for group in (self, *others) for path in group.outputs]
        return EndpointGroup(self._source, self._shape, paths)


class RemotePlacement(Placement):
    """A linear of a base executor, without a weight in this process."""

    offers = frozenset({Offer.BACKWARD})

    def __init__(self, source: Source, shape: GroupShape, path: str, has_bias: bool) -> None:
        """Raises WeightsUnreadable."""
        self._path = path
        self._own = EndpointGroup(source, shape, [path])
        self.group = self._own
        # The product of zeros is the bias, to the bit.
        zeros = torch.zeros(1, shape.inputs, dtype=DTYPES[source.base.dtype])
        self.bias = self.forward(zeros)[0] if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self._own.launch(x, [self._path]).result()
        return y

    def backward(self, grad: Tensor) -> Tensor:
        return self._own.launch_backward({self._path: grad}).result()

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


class Offered:
    """All linears of several sources by path; of a linear that several have, the first one's."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._found: dict[str, tuple[Source, GroupShape]] = {}
        for source in sources:
            for shape in source.base.groups:
                for path in shape.outputs:
                    self._found.setdefault(path, (source, shape))

    def __contains__(self, path: str) -> bool:
        return path in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def shape(self, path: str) -> tuple[int, int]:
        """Widths of output and input."""
        _, shape = self._found[path]
        return shape.outputs[path], shape.inputs

    def address(self, path: str) -> str:
        """The address of the executor that computes a linear."""
        return self._found[path][0].address

    def by_address(self, paths: Iterable[str]) -> dict[str, list[str]]:
        """These linears by the address of their executor."""
        found: dict[str, list[str]] = {}
        for path in paths:
            found.setdefault(self.address(path), []).append(path)
        return found

    def digest(self, path: str) -> str:
        """Content hash. Raises AdapterMismatch where the executor does not know it."""
        source, shape = self._found[path]
        if path not in shape.digests:
            raise AdapterMismatch(f"the executor at {source.address} does not tell what {path} is")
        return shape.digests[path]

    def spans(self, cuts: str) -> list[tuple[Source, SpanShape]]:
        """Spans between such cuts whose linears all come from the same executor as the span."""
        return [
            (source, span)
            for source in dict.fromkeys(source for source, _ in self._found.values())
            for span in source.base.spans
            if span.cuts == cuts
            and all(path in self._found and self._found[path][0] is source for path in span.linears)
        ]

    def placement(self, path: str, has_bias: bool) -> RemotePlacement:
        """Raises WeightsUnreadable."""
        return RemotePlacement(*self._found[path], path, has_bias)
