"""Messages on a stream: each is its length in four bytes, big-endian, and then itself."""

import asyncio
import struct

MOST_BYTES = 64 * 2**20
_LENGTH = struct.Struct(">I")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises IncompleteReadError (an EOFError) where the stream ends."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes is longer than any that is sent")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queues a message; the event loop sends it at once where the other end keeps up."""
    writer.write(_LENGTH.pack(len(body)) + body)
