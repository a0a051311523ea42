"""Placements: where a frozen linear is computed, and in which layout its weight is kept."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import exact_type
from coserve.kernels.cpu import multiplies_bfloat16


class Placement(Protocol):
    """Computes a frozen linear of the base, wherever its weight is."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bias included."""
        ...

    def backward(self, grad: Tensor) -> Tensor:
        """[..., out] to [..., in]: the gradient for the input."""
        ...

    def weight(self) -> Tensor:
        """The dense weight [out, in]."""
        ...

    def row_norms(self) -> Tensor:
        """Euclidean norm of each output's weights, [out], in at least float32 (DoRA needs them)."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[out], None where the linear has none."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes this placement holds."""
        ...

    @property
    def nbytes_to_train(self) -> int:
        """Bytes more that it will hold for good once a gradient has come through it; 0 from then on."""
        ...


class PlainPlacement:
    """The weight as it was loaded, [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self.bias)

    def backward(self, grad: Tensor) -> Tensor:
        return grad @ self._weight

    def weight(self) -> Tensor:
        return self._weight

    def row_norms(self) -> Tensor:
        return row_norms(self._weight)

    @property
    def pointer(self) -> int:
        """Identity of the weight's storage: a tied head shares it with the embedding."""
        pointer: int = self._weight.untyped_storage()._cdata  # there for tensors without data, too
        return pointer

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def nbytes_to_train(self) -> int:
        return 0


class PackedPlacement:
    """The weight reordered once into the layout oneDNN's bfloat16 product reads.

    torch's own linear reorders it in every call, which is most of what a decode step costs: at 1 / 16 / 64
    rows of a 2816x1024 linear on two cores, 0.09 / 0.19 / 0.45 ms packed against 0.30 / 0.41 / 0.74 ms.
    The results are bit for bit the same. The transposed weight is packed when training first needs it; a
    server that never trains never pays for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias
        self._transposed: Tensor | None = None
        self._bytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def backward(self, grad: Tensor) -> Tensor:
        if self._transposed is None:
            self._transposed = torch.ops.mkldnn._reorder_linear_weight(self.weight().t().contiguous(), None)
        gx: Tensor = torch.ops.mkldnn._linear_pointwise(grad, self._transposed, None, "none", [], "")
        return gx

    def forget_transposed(self) -> None:
        """Gives back what `backward` holds; the next one packs it again."""
        self._transposed = None

    def weight(self) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense

    def row_norms(self) -> Tensor:
        return row_norms(self.weight())

    @property
    def nbytes(self) -> int:
        copies = 1 if self._transposed is None else 2
        return copies * self._bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def nbytes_to_train(self) -> int:
        return self._bytes if self._transposed is None else 0


def row_norms(weight: Tensor) -> Tensor:
    """Row norms [out] of a dense weight [out, in], in at least float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=exact_type(weight.dtype))
    return norms


def place_locally(weight: Tensor, bias: Tensor | None) -> Placement:
    """The fastest local placement for this weight [out, in] on its device."""
    if multiplies_bfloat16(weight):
        return PackedPlacement(weight, bias)
    return PlainPlacement(weight, bias)
