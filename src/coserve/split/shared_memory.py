"""Tensors in memory that a client and an executor of one host share; headers go over their unix socket.

The executor makes the memory, a file without a name (memfd) whose size is sealed, and passes it at the
greeting (SCM_RIGHTS). So no other process can open it, neither end can shorten it (which would end the other
with SIGBUS), and it is freed with the last of both, however they end. It has a slot for each call that may be
under way. A call's tensors are at the beginning of its slot. The answer replaces them there, as a slot is at
least as wide as either (Symbiosis, 3.5). Tensors that do not fit go over the socket.

A header is sent after the bytes were written, and received before they are read, which orders the accesses of
the two processes without polling. The executor computes on the slot itself. A client that changes it
meanwhile changes its own answer: sizes and shapes come from the header, which was read and checked once.

There are three copies (rows into the slot, product into the slot, answer out of it), without the kernel. A
socket makes four in the kernel, in pieces of its buffer.
"""

import array
import ctypes
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import torch
from torch import Tensor

from coserve.split.channel import MOST_UNDER_WAY, Decode, In, Rest, SocketChannel
from coserve.split.messages import (
    ITEM_BYTES,
    BaseHello,
    CallDtype,
    LinearAnswer,
    LinearCall,
    SlotShape,
    ToClient,
    ToExecutor,
    encode_header,
)
from coserve.split.payload import CALL_DTYPES
from coserve.wire.frames import frame_views, send_views

# Twice a piece (`remote_group.PIECE`), for calls of decoder layers, which are not cut within a sequence.
# Memory that nobody wrote to takes no room.
SLOT_BYTES: Final = 16 << 20
_CAN: Final = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")  # Linux


class Slots:
    """Mapped slots of one connection."""

    def __init__(self, file: int, shape: SlotShape) -> None:
        """Maps a file; the caller closes it. Raises OSError where its size is not sealed, or too small."""
        size = shape.count * shape.nbytes
        if os.fstat(file).st_size < size or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the shared memory's size is not sealed, or too small")
        self.shape = shape
        self._mapped = mmap.mmap(file, size)
        self._whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._start = self._whole.data_ptr()
        self._views = {
            dtype: [slot.view(kind) for slot in torch.split(self._whole, shape.nbytes)]
            for dtype, kind in CALL_DTYPES.items()
        }

    def tensors(self, slot: int, rows: int, widths: Sequence[int], dtype: CallDtype) -> list[Tensor]:
        """Tensors [rows, width] at the beginning of a slot, uncopied."""
        flat, start, found = self._views[dtype][slot], slot * self.shape.nbytes // ITEM_BYTES[dtype], []
        for width in widths:
            found.append(flat.as_strided((rows, width), (width, 1), start))
            start += rows * width
        return found

    def write(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Copies contiguous tensors to the beginning of a slot. (A call of memmove takes 1 us, torch's copy
        to a view 8.)"""
        if sum(tensor.nbytes for tensor in tensors) > self.shape.nbytes:
            raise ValueError("tensors that are larger than a slot")
        start = self._start + slot * self.shape.nbytes
        for tensor in tensors:
            ctypes.memmove(start, tensor.data_ptr(), tensor.nbytes)
            start += tensor.nbytes


def make_slots(nbytes: int) -> tuple[int, Slots] | None:
    """New slots and their file, which the caller closes; None where this system has none to give."""
    if not _CAN:
        return None
    shape = SlotShape(MOST_UNDER_WAY, nbytes)
    try:
        file = os.memfd_create("coserve-split", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(file, shape.count * shape.nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return file, Slots(file, shape)
    except (OSError, ValueError):
        os.close(file)
        return None


class SharedChannel(SocketChannel[In]):
    """A socket channel, the tensors of whose messages are in slots where they fit."""

    def __init__(
        self, sock: socket.socket, decode: Decode[In], slots: Slots, tick: float, silence: float
    ) -> None:
        super().__init__(sock, decode, tick=tick, silence=silence)
        self._slots = slots

    def receive_tensors(
        self, message: LinearCall | LinearAnswer, rows: int, widths: Sequence[int], dtype: CallDtype
    ) -> list[Tensor]:
        """The slot itself, if the message names one."""
        if message.slot is None:
            return super().receive_tensors(message, rows, widths, dtype)
        self._check(message)
        if (nbytes := rows * sum(widths) * ITEM_BYTES[dtype]) != message.nbytes:
            raise ConnectionError(f"{message.nbytes} bytes in a slot instead of {nbytes}")
        return self._slots.tensors(message.slot, rows, widths, dtype)

    def skip_tensors(self, message: LinearCall | LinearAnswer) -> None:
        if message.slot is None:
            super().skip_tensors(message)
        else:
            self._check(message)

    def _check(self, message: LinearCall | LinearAnswer) -> None:
        shape = self._slots.shape
        if message.slot is None or message.slot >= shape.count or message.nbytes > shape.nbytes:
            raise ConnectionError(f"{message.nbytes} bytes in slot {message.slot} of {shape.count}")


class ExecutorSharedChannel(SharedChannel[ToExecutor]):
    """The executor's end: answers in the slot of their call."""

    def send(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        super().send(*self._placed(message, tensors))

    def send_now(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> Rest | None:
        if sum(tensor.nbytes for tensor in tensors) > _COPIED_AT_ONCE:
            return lambda: self.send(message, tensors)
        return super().send_now(*self._placed(message, tensors))

    def _placed(
        self, message: ToExecutor | ToClient, tensors: Sequence[Tensor]
    ) -> tuple[ToExecutor | ToClient, Sequence[Tensor]]:
        if not isinstance(message, LinearAnswer) or message.slot is None:
            return message, tensors
        if not tensors or message.nbytes > self._slots.shape.nbytes:
            return msgspec.structs.replace(message, slot=None), tensors
        self._slots.write(message.slot, [tensor.contiguous() for tensor in tensors])
        return message, ()


_COPIED_AT_ONCE: Final = 1 << 18  # bytes of an answer that the computing thread copies itself


class ClientSharedChannel(SharedChannel[ToClient]):
    """The client's end: it gives each call a slot, and copies the answer out of it."""

    def __init__(
        self, sock: socket.socket, decode: Decode[ToClient], slots: Slots, tick: float, silence: float
    ) -> None:
        super().__init__(sock, decode, slots, tick, silence)
        self._free = list(range(slots.shape.count))  # the last is the one in caches
        self._of_call: dict[int, int] = {}  # slots

    def send(self, message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        if isinstance(message, LinearCall) and message.nbytes <= self._slots.shape.nbytes and self._free:
            slot = self._free.pop()
            self._of_call[message.number] = slot
            self._slots.write(slot, tensors)
            super().send(msgspec.structs.replace(message, slot=slot))
        else:
            super().send(message, tensors)

    def receive(self) -> ToClient | None:
        message = super().receive()
        if isinstance(message, LinearAnswer) and message.slot is None:  # its slot has nothing to be read
            self._release(message.number)
        return message

    def receive_tensors(
        self, message: LinearCall | LinearAnswer, rows: int, widths: Sequence[int], dtype: CallDtype
    ) -> list[Tensor]:
        if message.slot is None:
            return super().receive_tensors(message, rows, widths, dtype)
        if message.slot != self._of_call.get(message.number):
            raise ConnectionError(f"an answer in slot {message.slot}, which is not the call's")
        answer = [tensor.clone() for tensor in super().receive_tensors(message, rows, widths, dtype)]
        self._release(message.number)
        return answer

    def _release(self, number: int) -> None:
        if (slot := self._of_call.pop(number, None)) is not None:
            self._free.append(slot)


def send_with_file(sock: socket.socket, hello: BaseHello, file: int) -> None:
    """Sends a greeting, and a file beside its first byte. Raises OSError."""
    (frame,) = frame_views(encode_header(hello), ())
    sent = socket.send_fds(sock, [frame], [file])
    if sent < len(frame):
        send_views(sock, [frame[sent:]])


class FileStream:
    """A unix socket from which bytes and at most one file are received."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.file: int | None = None

    def recv(self, bufsize: int, /) -> bytes:
        """See `socket.recv`; keeps a file descriptor that comes with the bytes."""
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(bufsize, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, given in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for file in array.array("i", given[: len(given) // 4 * 4]):
                    self.close()
                    self.file = file
        return data

    def recv_into(self, buffer: memoryview, /) -> int:
        """See `socket.recv_into`."""
        return self._socket.recv_into(buffer)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """See `socket.sendmsg`."""
        return self._socket.sendmsg(buffers)

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """See `socket.setsockopt`."""
        self._socket.setsockopt(level, option, value)

    def close(self) -> None:
        """Closes the file, if one came."""
        if self.file is not None:
            with suppress(OSError):
                os.close(self.file)
        self.file = None
