"""Messages between a sandbox and its parent: four bytes of length, then msgpack."""

from typing import Any, Final

import msgspec

RESULT: Final = 0  # the last reply of a call; `value` is what the function returned
ITEM: Final = 1  # one item of an iterator that it returned
ERROR: Final = 2  # the last reply of a call; `value` is (class, text)
MEMORY_ENDED: Final = 86  # exit status of a child that has no memory to say so


class Returned(msgspec.Struct, array_like=True):
    """One reply of a child; `kind` is one of the constants above."""

    kind: int
    value: Any = None


def frame(value: Any) -> bytes:
    """A message as bytes."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "big") + data


def length_of(buffer: bytes | bytearray) -> int | None:
    """Bytes of the message that `buffer` begins with, without its length; None while that is incomplete."""
    return int.from_bytes(buffer[:4], "big") if len(buffer) >= 4 else None
