"""Random ids in OpenAI's style: a kind, a hyphen and 24 letters and digits."""

import secrets
import string
from typing import Final

_LETTERS: Final = string.ascii_letters + string.digits
_LENGTH: Final = 24  # 142 bits


def new_id(kind: str) -> str:
    """A new id such as `file-9fGh…`; `kind` is the part before the hyphen."""
    return f"{kind}-{''.join(secrets.choice(_LETTERS) for _ in range(_LENGTH))}"


def tail_of(id: str) -> str:
    """Random part of an id."""
    return id.rpartition("-")[2]


def of_attempt(name: str, fence: int) -> str:
    """The name of what the owner with this fencing number makes. Each owner has names of its own, so what one
    writes that has lost its lease is never in the place of what the next one has published."""
    return name if fence <= 1 else f"{name}.{fence}"
