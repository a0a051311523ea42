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
