"""Types that msgspec decodes on several threads."""

import threading
from typing import Any, Final

import msgspec

_LOCK: Final = threading.Lock()
_SEEN: Final[set[Any]] = set()


def decodable(kind: Any) -> Any:
    """Returns `kind`, once msgspec has looked at its fields and those of all types within it.

    msgspec does that at the first conversion to a dataclass, and 0.22 ends the process with a segmentation
    fault where two threads do it at the same time (2 of 6 runs with four threads). So one thread does it.
    """
    if kind not in _SEEN:
        with _LOCK:
            msgspec.msgpack.Decoder(kind)
            _SEEN.add(kind)
    return kind
