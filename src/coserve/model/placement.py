"""Placements: where a frozen linear is computed, and in which layout its weight is kept."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.adapters.bypass import exact_type
from coserve.errors import NotOffered
from coserve.kernels.cpu import multiplies_bfloat16
from coserve.kernels.native import ops as native
from coserve.kernels.native.layer import PackedLinear
from coserve.model.group import Group

MOST_ROWS: Final = 64  # of a native product; with more oneDNN's is as fast


class Offer(Enum):
    """Optional operations of a placement, and their users."""

    BACKWARD = "the gradient for its input, which training needs"
    ROW_NORMS = "the norms of its weight's rows, which DoRA needs"
    WEIGHT = "its dense weight, which replacing, merging and comparing it need"


class Placement(ABC):
    """Computes a frozen linear of the base, wherever its weight is. The product is always offered, other
    operations if in `offers`; they raise NotOffered otherwise. `bias` is [out], None where the linear has
    none. An asynchronous placement belongs to a `group`, which rows call; its `forward` and `backward` block.
    `computes_rows` tells that some rows cost less than all; not where the products are there already.
    `backward_nbytes` are bytes of weights that each backward allocates and frees; nothing of it is kept."""

    bias: Tensor | None
    offers: frozenset[Offer] = frozenset(Offer)
    group: Group | None = None
    computes_rows: bool = True
    _native: PackedLinear | None = None
    backward_nbytes: int = 0

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], bias included."""

    def backward(self, grad: Tensor) -> Tensor:
        """[..., out] to [..., in]: the gradient for the input."""
        raise self._lacks(Offer.BACKWARD)

    def entering(self, x: Tensor) -> Tensor:
        """The input of the linear and of its bypasses, in the current graph if there is one: x, whose
        gradient becomes whole where a rank gives a part of it (`model/sharded`)."""
        return x

    def complete(self, y: Tensor) -> Tensor:
        """The linear's output, in the current graph if there is one, for the product with all bypasses added;
        y may change."""
        return y

    def weight(self) -> Tensor:
        """The dense weight [out, in]."""
        raise self._lacks(Offer.WEIGHT)

    def row_norms(self) -> Tensor:
        """Euclidean norm of each output's weights, [out], in at least float32."""
        raise self._lacks(Offer.ROW_NORMS)

    def expect(self, offer: Offer, path: str) -> None:
        """Raises NotOffered, naming the linear at `path`, where the placement lacks the offer."""
        if offer not in self.offers:
            raise self._lacks(offer, path)

    @property
    def is_elsewhere(self) -> bool:
        """Tells whether another process computes its products: a call for each, so none is asked for twice
        that can be kept."""
        return self.group is not None

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors on this device, by name; none of a remote placement."""

    @property
    def nbytes(self) -> int:
        """Bytes this placement holds."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def rounded(self, weight: Tensor) -> Tensor:
        """A dense weight [out, in], rounded as this kind of placement would store it."""
        return weight

    @property
    def native(self) -> PackedLinear | None:
        """The weight as the kernel of a whole layer reads it, None where it does not; another object once it
        lies elsewhere."""
        return self._native

    def moved(self) -> None:  # noqa: B027
        """Follows its tensors, whose data are at other addresses now."""

    def _lacks(self, offer: Offer, path: str = "a linear") -> NotOffered:
        kind = type(self).__name__
        return NotOffered(f"{path} is computed by a {kind}, which does not offer {offer.value}")


class Placed(nn.Module):
    """A module of a base whose weights its placement holds."""

    placement: Placement


class PlainPlacement(Placement):
    """A dense weight [out, in], as loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None, float32: bool = False) -> None:
        """`float32`: a weight in that type may be read by a kernel, where there is one."""
        self._weight, self.bias = weight, bias
        address = native.unpacked_address(weight, bias) if float32 else None
        self._native = _native(address, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = _few(self.native, x)
        return F.linear(x, self._weight, self.bias) if y is None else y

    def backward(self, grad: Tensor) -> Tensor:
        return grad @ self._weight

    def weight(self) -> Tensor:
        return self._weight

    def row_norms(self) -> Tensor:
        return row_norms(self._weight)

    def tensors(self) -> Mapping[str, Tensor]:
        return present(weight=self._weight, bias=self.bias)

    @property
    def native(self) -> PackedLinear | None:
        if self._native is not None and self._native.address != self._weight.data_ptr():
            self.moved()  # the weight's data may be replaced at any time
        return self._native

    def moved(self) -> None:
        if self._native is not None:
            self._native = replace(self._native, address=self._weight.data_ptr())


class PackedPlacement(Placement):
    """A weight packed once into the layout of oneDNN's bfloat16 product.

    torch's own linear packs it in every call, most of the cost of a decode step: at 1 / 16 / 64 rows of a
    2816x1024 linear on two cores, 0.09 / 0.19 / 0.45 ms packed against 0.30 / 0.41 / 0.74 ms. Results are bit
    for bit the same.

    The way back reads the same packed weight: a transposed copy would be a second base in memory. Where the
    native kernels know the layout, columns are unpacked into a cache and multiplied; elsewhere all of the
    weight is unpacked for the time of the product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias
        address = native.packed_address(self._packed, weight)
        self._native = _native(address, weight, bias)
        self.backward_nbytes = weight.nbytes if self.native is None else native.unpacked_nbytes(*weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        y = _few(self.native, x)
        if y is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def backward(self, grad: Tensor) -> Tensor:
        own = self.native
        if own is not None and grad.dtype is own.dtype and native.takes(grad):
            return native.times_packed(grad, own.address, own.inputs)
        return grad @ self.weight()

    def moved(self) -> None:
        if self._native is not None:
            self._native = replace(self._native, address=torch.ops.mkldnn.data_ptr(self._packed))

    def weight(self) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense

    def row_norms(self) -> Tensor:
        return row_norms(self.weight())

    def tensors(self) -> Mapping[str, Tensor]:
        return present(packed=self._packed, bias=self.bias)


def _few(own: PackedLinear | None, x: Tensor) -> Tensor | None:
    """The product of x [..., in] by a kernel; None where it does not read x, or torch's is as fast."""
    if own is None or x.numel() > MOST_ROWS * own.inputs or x.shape[-1] != own.inputs:
        return None
    if x.dtype is not own.dtype or not native.takes(x):
        return None
    return native.linear(x, own.address, own.outputs, own.bias)


def _native(address: int | None, weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    outputs, inputs = weight.shape
    return None if address is None else PackedLinear(address, inputs, outputs, weight.dtype, bias)


def present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are not None, by name."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def row_norms(weight: Tensor) -> Tensor:
    """Row norms [out] of a dense weight [out, in], in at least float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=exact_type(weight.dtype))
    return norms


def place_locally(weight: Tensor, bias: Tensor | None, float32: bool = True) -> Placement:
    """The fastest local placement for this weight [out, in] on its device. In float32 few rows are multiplied
    by a kernel only with `float32`."""
    if multiplies_bfloat16(weight):
        return PackedPlacement(weight, bias)
    return PlainPlacement(weight, bias, float32)
