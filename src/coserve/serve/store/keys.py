"""API keys: 256 random bits, shown once. Only their SHA-256 is stored.

A key is looked up by its prefix, which is not secret, and compared in constant time. Keys are random, so a
plain hash suffices.
"""

import hashlib
import hmac
import re
import secrets
from typing import Final

MARK: Final = "sk-coserve-"
TINKER_MARK: Final = "tml-"
_BYTES: Final = 32
_SHAPE: Final = re.compile(re.escape(MARK) + "[A-Za-z0-9_-]{43}")  # 32 bytes in base 64
_SHOWN: Final = 6  # characters after the mark: 36 bits that tell keys apart in a list


def draw() -> str:
    """A new secret."""
    return MARK + secrets.token_urlsafe(_BYTES)


def plain(secret: str) -> str:
    """A key without the mark that `tinker` clients want at its beginning: `tml-KEY` is the same key as
    `KEY`."""
    return secret.removeprefix(TINKER_MARK)


def is_shaped(secret: str | None) -> bool:
    """Tells whether `secret` has the format of `draw`."""
    return secret is not None and _SHAPE.fullmatch(secret) is not None


def prefix_of(secret: str) -> str:
    """Prefix of a key, which may be shown."""
    return secret[: len(MARK) + _SHOWN]


def digest_of(secret: str) -> bytes:
    """SHA-256 of a key, the stored form."""
    return hashlib.sha256(secret.encode()).digest()


def matches(secret: str, digest: bytes) -> bool:
    """Tells whether `digest` was made from this secret."""
    return hmac.compare_digest(digest_of(secret), digest)
