"""Runs code on tensors that hold no data, and counts the bytes they would take.

The program is the real one: torch's fake tensors have shapes, types, storages and lifetimes, and all below
them (kernel choice, tensors saved by autograd, their release) behaves as with data. So the count is what a
device's allocator would be asked for, for any model and method, without formulas.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_iter

BEFORE: Final = -1  # mark of what precedes the layers
_DEVICE: Final = torch.ops.prim.device.default
_NOTHING: Final[Mapping[str, object]] = {}


class Allocations(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Bytes of all live storages, and their peak. `segments` has the peaks between two marks of a program,
    each with the number of the first of them.

    Tensors of other modes do not count: fake tensors made by nested tracing take no memory in the real
    program either.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live = 0
        self.segments: list[tuple[int, int]] = []
        self._peak = 0
        self._mark, self._segment = BEFORE, 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._is_inside = False  # in an operator: what its fake form calls is no operator of the program

    @property
    def peak(self) -> int:
        """Most bytes alive since the last reset."""
        return self._peak

    def reset(self) -> None:
        """Starts the peak again from the bytes alive now."""
        self._peak = self.live

    def mark(self, number: int) -> None:
        """Ends a segment, and begins the one of this number."""
        self.segments.append((self._mark, self._segment))
        self._mark, self._segment = number, self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, object] = _NOTHING
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all calls, answered first
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._is_inside:
            return self.dispatch(func, types, args, kwargs)
        self._is_inside = True
        try:
            out = self._run(func, types, args, kwargs)
        finally:
            self._is_inside = False
        for tensor in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self._segment = max(self._segment, self.live)
        self._peak = max(self._peak, self.live)
        return out

    def _run(self, func: Any, types: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        if func in _PLAIN and (device := self._device_of(args, kwargs)) is not None:
            with in_kernel_invocation_manager(self):
                out = func(*args, **kwargs)
            return FakeTensor(self, out, device)
        if (answer := _ANSWERS.get(func)) is None:
            return self.dispatch(func, types, args, kwargs)
        with self:  # a mode is off while it dispatches
            return answer(*args, **kwargs)

    def _device_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device | None:
        """The one device of all tensors among the arguments; None where they are not all fake tensors of this
        mode that hold nothing, on one device."""
        found: torch.device | None = None
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) is not FakeTensor or arg.fake_mode is not self or arg.constant is not None:
                    return None
                if found is not None and arg.fake_device != found:
                    return None
                found = arg.fake_device
        return None if any(isinstance(arg, Tensor) for arg in kwargs.values()) else found

    def _count(self, tensor: Tensor) -> None:
        if getattr(tensor, "fake_mode", None) is not self:
            return
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key in self._storages:
            return
        nbytes = storage.nbytes()

        def gone(_: object) -> None:
            self.live -= nbytes
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self.live += nbytes


@contextmanager
def fake_tensors() -> Iterator[Allocations]:
    """Runs the block on tensors without data and gives its allocations."""
    with Allocations() as counted:
        yield counted


def is_fake(tensor: Tensor) -> bool:
    """Tells whether a tensor holds no data."""
    return isinstance(tensor, FakeTensor)


def unlike(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts, of some worked on one after the other, that can take other memory than the one before. Where
    they hold no data these are the first two, which meet what the first has left, and the last, which may be
    smaller; else all."""
    return [*parts[:2], parts[-1]] if len(parts) > 3 and is_fake(parts[0]) else parts


def _zeros(tensor: FakeTensor) -> NDArray[np.float32]:
    return np.zeros(tuple(tensor.shape), np.float32)


FakeTensor.numpy = _zeros  # type: ignore[assignment]  # torch has none, as there is no data


_draw_truncated: Final = nn.init._no_grad_trunc_normal_


def _truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch draws again until all numbers are within the bounds, which those of fake tensors never are."""
    return tensor if is_fake(tensor) else _draw_truncated(tensor, *args, **kwargs)


nn.init._no_grad_trunc_normal_ = _truncated


def _number(tensor: Tensor) -> bool | int | float:
    """Value read from a fake tensor: zero, which is finite and a valid token id; True for a bool."""
    if tensor.dtype == torch.bool:
        return True
    return 0.0 if tensor.is_floating_point() else 0


def _all_of_them(tensor: Tensor) -> Tensor:
    """Answers `nonzero` as if every element were nonzero, the largest result possible."""
    return torch.zeros(tensor.numel(), tensor.ndim, dtype=torch.long, device=tensor.device)


def _same(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Experts' grouped product in any type; torch's fake implementation has bfloat16 only."""
    if a.ndim == b.ndim == 2:
        assert offs is not None, "groups of both"
        shape = (len(offs), a.shape[0], b.shape[1])
    elif a.ndim == b.ndim:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[0], b.shape[2]) if a.ndim == 2 else (a.shape[1], b.shape[1])  # type: ignore[assignment]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


_aten: Final = torch.ops.aten
# Operators whose one new result, or view, is what the same operator makes on the meta device. FakeTensorMode
# comes to it too, after general checks and its cache of shapes, in 2 to 10 times the time.
_PLAIN: Final = frozenset({
    _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default, _aten.expand.default,
    _aten.permute.default, _aten.select.int, _aten.slice.Tensor, _aten.squeeze.dim, _aten.t.default,
    _aten.transpose.int, _aten.unsqueeze.default, _aten.view.default, _aten.bmm.default, _aten.mm.default,
    _aten.add.Tensor, _aten.div.Tensor, _aten.mul.Tensor, _aten.neg.default, _aten.sub.Tensor,
    _aten.rsqrt.default, _aten.sigmoid.default, _aten.silu.default, _aten.mean.dim, _aten.pow.Tensor_Scalar,
    _aten.cos.default, _aten.sin.default,
})  # fmt: skip

# Operators whose results depend on values, or that have no form without them. Packed weights are as large as
# plain ones.
_ANSWERS: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten.nonzero.default: _all_of_them,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.equal.default: lambda *_: True,
    torch.ops.mkldnn._reorder_linear_weight.default: _same,
}
