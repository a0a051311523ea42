"""Frozen linears: where each one runs is its placement's business, nobody else's.

A frozen linear's backward needs its weights and nothing else (`grad @ W`): it stores neither its input
nor its output. That is FlexLLM's pruning of frozen-weight gradients (5.2) at the smallest grain.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.adapters.bypass import exact_type
from coserve.kernels.beside import Beside
from coserve.kernels.cpu import multiplies_bfloat16
from coserve.model.batch import BatchCell


class Placement(Protocol):
    """Where a frozen linear of the base is computed."""

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
        """Where the weight's storage lies: a tied head shares it with the embedding."""
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
    """Of a dense weight [out, in], in at least float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=exact_type(weight.dtype))
    return norms


def place_locally(weight: Tensor, bias: Tensor | None) -> Placement:
    """The fastest local placement for this weight [out, in] on its device."""
    if multiplies_bfloat16(weight):
        return PackedPlacement(weight, bias)
    return PlainPlacement(weight, bias)


class _Frozen(torch.autograd.Function):
    """A placement in a graph. `kept` [..., out] stands for the product where the tape has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, kept: Tensor | None) -> Tensor:
        ctx.placement = placement
        return placement.forward(x) if kept is None else kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.placement.backward(grads[0]), None, None


def frozen(x: Tensor, placement: Placement, kept: Tensor | None = None) -> Tensor:
    """The placement's product in the current graph, if there is one."""
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Frozen.apply(x, placement, kept)  # type: ignore[no-untyped-call]
        return y
    return placement.forward(x) if kept is None else kept


class _Bypassed(torch.autograd.Function):
    """A placement and low-rank bypasses beside it, in a graph: the gradient of what they are given comes of
    one product, to which those of the bypasses are added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, placement: Placement, kept: Tensor | None, beside: Beside, *matrices: Tensor
    ) -> Tensor:
        ctx.placement, ctx.beside = placement, beside
        ctx.save_for_backward(x, *matrices)
        y = placement.forward(x) if kept is None else kept
        if beside.is_added:
            return y
        if kept is not None:
            y = y.clone()
        count = len(matrices) // 2
        beside.add_(x.flatten(0, -2), y.flatten(0, -2), matrices[:count], matrices[count:])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = ctx.placement.backward(grad) if ctx.needs_input_grad[0] else None
        into = None if found is None else found.view(-1, x.shape[-1])
        count = len(matrices) // 2
        of_a, of_b = ctx.beside.back(
            grad.view(-1, grad.shape[-1]), x.flatten(0, -2), matrices[:count], matrices[count:], into
        )
        return found, None, None, None, *of_a, *of_b


def bypassed(x: Tensor, placement: Placement, beside: Beside, kept: Tensor | None = None) -> Tensor:
    """The placement's product of x [..., in], or what was kept of it, with low-rank bypasses over its rows;
    in the current graph, which there is."""
    y: Tensor = _Bypassed.apply(x, placement, kept, beside, *beside.a, *beside.b)  # type: ignore[no-untyped-call]
    return y


class FrozenLinear(nn.Module):
    """Stands where a linear of the base stood; `path` is that linear's name in the model.

    During a run the rows in the base's cell decide what else happens to the product: bypasses of
    adapters are added, and what training wants of it is kept.
    """

    def __init__(self, path: str, placement: Placement, shape: tuple[int, int], cell: BatchCell) -> None:
        super().__init__()
        self.path = path
        self.placement = placement
        self.out_features, self.in_features = shape
        self.cell = cell

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in]; model code asks a linear for its dtype or device now and then."""
        return self.placement.weight()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.cell.rows
        return frozen(x, self.placement) if rows is None else rows.linear(self.path, self.placement, x)

    def extra_repr(self) -> str:
        return f"{self.path}: {self.in_features} -> {self.out_features}, {type(self.placement).__name__}"
