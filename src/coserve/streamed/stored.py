"""Parameters of a block in files: which bytes are read into a buffer, and which tensors lie there."""

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.model.block import Block
from coserve.model.placement import Placement
from coserve.streamed import packed
from coserve.streamed.files import PAGE, WeightFile
from coserve.streamed.packed import PackedForm
from coserve.streamed.scratch import ScratchFile, nbytes_of

ALIGNED: Final = 64  # bytes, for vector instructions
_FEW: Final = 1 / 64  # share of a block's bytes that no file has, such as masks and tables: they stay


class ReadBuffer:
    """Memory aligned for direct reads."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(-(-nbytes // PAGE) * PAGE, PAGE))
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Place of a dense tensor in the buffer; None where it has none."""
        if tensor.is_mkldnn or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - self.tensor.data_ptr()
        return offset if 0 <= offset <= len(self.bytes) - tensor.nbytes else None


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

    def nothing(self) -> Tensor:
        """A tensor without memory in its place; NaN, or as large as its type allows."""
        if self.packed is not None:
            return packed.nothing(self.dtype)
        none = float("nan") if self.dtype.is_floating_point else 99 if self.dtype != torch.bool else True
        return torch.full((), none, dtype=self.dtype).expand(self.shape)


class StoredBlock:
    """A block whose parameters are read from files into a buffer. Its tensors' data are there between `bind`
    and `release`, and nowhere at other times."""

    def __init__(self, block: Block, reads: Sequence[Read], tensors: Sequence[tuple[Tensor, int]]) -> None:
        """`tensors` come with their offsets in a buffer."""
        self.block = block
        self._reads = reads
        self._tensors = [(tensor, _Form.of(tensor, offset)) for tensor, offset in tensors]
        found = (own.placement for own in block.parameters().values())
        self._placements: list[Placement] = [placement for placement in found if placement is not None]
        self._views: dict[int, list[Tensor]] = {}  # by address of a buffer
        self.nbytes = max((read.end for read in reads), default=0)
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

    def bind(self, buffer: ReadBuffer) -> None:
        """Has the block compute with a buffer's contents."""
        address = buffer.tensor.data_ptr()
        if address not in self._views:
            self._views[address] = [form.over(buffer.tensor) for _, form in self._tensors]
        for (tensor, _), view in zip(self._tensors, self._views[address], strict=True):
            tensor.data = view
        for placement in self._placements:
            placement.moved()

    def release(self) -> None:
        """Takes the block's tensors away."""
        for tensor, form in self._tensors:
            tensor.data = form.nothing()

    def forget(self) -> None:
        """Drops views of buffers that will not be used again."""
        self._views.clear()


def store(block: Block, buffer: ReadBuffer, reads: Sequence[Read], scratch: ScratchFile) -> StoredBlock:
    """Stores a block whose tensors are in memory: as `reads` has them, from which `buffer` was filled, where
    all of them still lie there; else in the scratch file."""
    tensors = _tensors_of(block)
    offsets = [buffer.offset_of(tensor) for tensor in tensors]
    strangers = [tensor for tensor, offset in zip(tensors, offsets, strict=True) if offset is None]
    if sum(map(nbytes_of, strangers)) <= _FEW * sum(map(nbytes_of, tensors)):
        for tensor in strangers:
            if not tensor.is_mkldnn:
                tensor.data = tensor.data.clone()  # it may be a part of something large
        pairs = zip(tensors, offsets, strict=True)
        return StoredBlock(block, reads, [(tensor, offset) for tensor, offset in pairs if offset is not None])
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


def _tensors_of(block: Block) -> list[Tensor]:
    """Parameters and buffers of a block, each once."""
    tensors = (tensor for own in block.parameters().values() for tensor in own.tensors.values())
    return [*{id(tensor): tensor for tensor in tensors if nbytes_of(tensor)}.values()]
