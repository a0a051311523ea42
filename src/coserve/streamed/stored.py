"""Parameters of a block in files: which bytes are read into a buffer, and which tensors lie there."""

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from coserve.model.block import Block
from coserve.model.placement import Placement
from coserve.streamed.files import PAGE, WeightFile
from coserve.streamed.scratch import ScratchFile, nbytes_of

ALIGNED: Final = 64  # bytes, for vector instructions
_FEW: Final = 1 / 64  # share of a block's bytes that no file has, such as masks and tables: they stay


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Shape, type and memory layout of a packed tensor, the last as oneDNN writes it down."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    descriptor: bytes

    @staticmethod
    def of(packed: Tensor) -> "PackedForm":
        written = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
        return PackedForm(tuple(packed.shape), packed.dtype, written.numpy().tobytes())

    def over(self, memory: Tensor) -> Tensor:
        """A packed tensor whose bytes are those of `memory` (uint8), which must outlive it. By the function
        through which torch's compiled models load theirs."""
        handle, library = ctypes.c_void_p(), _library()
        rank = len(self.shape)
        strides = torch.empty(self.shape, device="meta").stride()
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(rank), _numbers(self.shape), _numbers(strides),
            ctypes.c_int64(0), ctypes.c_int32(_code(self.dtype)),
            ctypes.c_int32(library.aoti_torch_device_type_cpu()), ctypes.c_int32(0), ctypes.byref(handle),
            ctypes.c_int32(library.aoti_torch_layout__mkldnn()), ctypes.c_char_p(self.descriptor),
            ctypes.c_int64(len(self.descriptor)),
        )  # fmt: skip
        if failed:
            raise RuntimeError("torch makes no packed tensor of this form")
        made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
        return made


@cache
def nothing(dtype: torch.dtype) -> Tensor:
    """A packed tensor that stands for one whose bytes are elsewhere."""
    return torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), None)  # type: ignore[no-any-return]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _code(dtype: torch.dtype) -> int:
    code: int = getattr(_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    return code


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _capsule(handle: ctypes.c_void_p) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(handle, None, None)


class BlockBuffer(ABC):
    """Memory for the bytes of a block (`tensor`, uint8), where it computes."""

    tensor: Tensor
    shift = 0  # bytes by which a block lies further on than in its `reads`

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def offset_of(self, tensor: Tensor) -> int | None:
        """Place of a dense tensor in the buffer; None where it has none."""
        if tensor.is_mkldnn or not tensor.is_contiguous() or tensor.device != self.tensor.device:
            return None
        offset = tensor.data_ptr() - self.tensor.data_ptr()
        return offset if 0 <= offset <= self.nbytes - tensor.nbytes else None

    @abstractmethod
    def fill(self, block: "StoredBlock") -> None:
        """Brings a block's bytes in. Raises WeightsUnreadable."""

    def empty(self) -> None:
        """Has zeros in it."""
        self.tensor.zero_()

    def settle(self) -> None:  # noqa: B027
        """Waits until nothing that was launched uses the contents."""

    def join(self) -> None:  # noqa: B027
        """Has the caller's stream wait until the contents are there."""

    def part(self) -> None:  # noqa: B027
        """Has the next contents wait for the caller's stream."""


class ReadBuffer(BlockBuffer):
    """Memory of the host, aligned for direct reads."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(-(-nbytes // PAGE) * PAGE, PAGE))
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def fill(self, block: "StoredBlock") -> None:
        block.read(self)


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes from `start` of a file, which go to `[into, end)` of a buffer."""

    file: WeightFile
    start: int
    into: int
    end: int


@dataclass(frozen=True, slots=True)
class _Form:
    """Layout of a tensor in a buffer, from `offset` on."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: PackedForm | None

    @staticmethod
    def of(tensor: Tensor, offset: int) -> "_Form":
        form = PackedForm.of(tensor) if tensor.is_mkldnn else None
        return _Form(offset, nbytes_of(tensor), tensor.dtype, tuple(tensor.shape), form)

    def over(self, memory: Tensor) -> Tensor:
        """The tensor in `memory`."""
        own = memory[self.offset : self.offset + self.nbytes]
        return own.view(self.dtype).view(self.shape) if self.packed is None else self.packed.over(own)

    def nothing(self, device: torch.device) -> Tensor:
        """A tensor without memory in its place; NaN, or as large as its type allows."""
        if self.packed is not None:
            return nothing(self.dtype)
        none = float("nan") if self.dtype.is_floating_point else 99 if self.dtype != torch.bool else True
        return torch.full((), none, dtype=self.dtype, device=device).expand(self.shape)


class StoredBlock:
    """A block whose parameters are read from files into a buffer. Its tensors' data are there between `bind`
    and `release`, and nowhere at other times. `held` has its bytes in the host's memory, beside a device that
    they are copied to; None where each visit reads them from the files."""

    def __init__(
        self, block: Block, reads: Sequence[Read], tensors: Sequence[tuple[Tensor, int]], shift: int = 0
    ) -> None:
        """`tensors` come with their offsets in a buffer, in which all lies `shift` further on than the reads
        say."""
        self.block, self.shift = block, shift
        self._reads = reads
        self._tensors = [(tensor, _Form.of(tensor, offset)) for tensor, offset in tensors]
        # Made once: on a GPU each would be a launch in every visit.
        self._nothing = [form.nothing(tensor.device) for tensor, form in self._tensors]
        found = (own.placement for own in block.parameters().values())
        self._placements: list[Placement] = [placement for placement in found if placement is not None]
        self._views: dict[BlockBuffer, list[Tensor]] = {}
        self.nbytes = max((read.end for read in reads), default=0)
        self.held: ReadBuffer | None = None
        self.release()

    @property
    def read_nbytes(self) -> int:
        """Bytes read for each visit."""
        return sum(read.end - read.into for read in self._reads)

    @property
    def reads(self) -> Sequence[Read]:
        return self._reads

    def read(self, buffer: ReadBuffer) -> None:
        """Fills a buffer. Raises WeightsUnreadable."""
        for read in self._reads:
            read.file.read(read.start, buffer.bytes[read.into : read.end])

    def bind(self, buffer: BlockBuffer) -> None:
        """Has the block compute with a buffer's contents."""
        if buffer not in self._views:
            self._views[buffer] = [form.over(buffer.tensor) for _, form in self._tensors]
        for (tensor, _), view in zip(self._tensors, self._views[buffer], strict=True):
            tensor.data = view
        for placement in self._placements:
            placement.moved()

    def release(self) -> None:
        """Takes the block's tensors away."""
        for (tensor, _), nothing in zip(self._tensors, self._nothing, strict=True):
            tensor.data = nothing

    def forget(self, buffer: BlockBuffer | None = None) -> None:
        """Drops views of a buffer that will not be used again, or of all."""
        if buffer is None:
            self._views.clear()
        else:
            self._views.pop(buffer, None)


def store(block: Block, buffer: BlockBuffer, reads: Sequence[Read], scratch: ScratchFile) -> StoredBlock:
    """Stores a block whose tensors are in memory: as `reads` has them, from which `buffer` was filled, where
    all of them still lie there; else in the scratch file."""
    tensors = tensors_of(block)
    offsets = [buffer.offset_of(tensor) for tensor in tensors]
    strangers = [tensor for tensor, offset in zip(tensors, offsets, strict=True) if offset is None]
    if sum(map(nbytes_of, strangers)) <= _FEW * sum(map(nbytes_of, tensors)):
        for tensor in strangers:
            if not tensor.is_mkldnn:
                tensor.data = tensor.data.clone()  # it may be a part of something large
        pairs = zip(tensors, offsets, strict=True)
        inside = [(tensor, offset) for tensor, offset in pairs if offset is not None]
        return StoredBlock(block, reads, inside, buffer.shift)
    placed, end = [], 0
    for tensor in tensors:
        if not tensor.is_mkldnn and not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()
        placed.append((tensor, end))
        end += -(-nbytes_of(tensor) // ALIGNED) * ALIGNED
    end = aligned_bytes(tensors)
    start = scratch.write(placed, end)
    return StoredBlock(block, [Read(scratch.file, start, 0, end)], placed)


def aligned_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors in a scratch file."""
    end = sum(-(-nbytes_of(tensor) // ALIGNED) * ALIGNED for tensor in tensors)
    return -(-end // PAGE) * PAGE


def tensors_of(block: Block) -> list[Tensor]:
    """Parameters and buffers of a block, each once."""
    tensors = (tensor for own in block.parameters().values() for tensor in own.tensors.values())
    return [*{id(tensor): tensor for tensor in tensors if nbytes_of(tensor)}.values()]
