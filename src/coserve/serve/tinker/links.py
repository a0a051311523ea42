"""Links to files of checkpoints that work without a key, for a while."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

LINK_SECONDS: Final = 3600


class Links:
    """Signs links with a secret of this process, so that none outlives it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._clock = secrets.token_bytes(32), clock

    def sign(self, checkpoint: str, file: str) -> tuple[str, int]:
        """The path and query of a link to a checkpoint's file, and when it expires, in Unix seconds."""
        expires = int(self._clock()) + LINK_SECONDS
        signature = self._signature(checkpoint, file, expires)
        return f"/tinker/weights/{checkpoint}/{file}?expires={expires}&signature={signature}", expires

    def check(self, checkpoint: str, file: str, expires: int, signature: str) -> bool:
        """Tells whether these are parts of a link that is signed and has not expired."""
        right = self._signature(checkpoint, file, expires)
        return hmac.compare_digest(right.encode(), signature.encode()) and expires > self._clock()

    def _signature(self, checkpoint: str, file: str, expires: int) -> str:
        said = f"{checkpoint}\n{file}\n{expires}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()
