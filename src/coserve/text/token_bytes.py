"""Bytes of single tokens, for log-probabilities."""

import re
from functools import cache
from typing import Final

from coserve.text.tokenizer import Tokenizer

_ANY: Final = "a"  # a token before, so that nothing is special about being the first
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps tokens to bytes. A token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._decoder = tokenizer.backend_tokenizer.decoder
        kinds = b"" if self._decoder is None else self._decoder.__getstate__()
        self._in_letters = b'"ByteLevel"' in kinds  # each byte is written as a letter
        self._has_bytes = b'"ByteFallback"' in kinds  # tokens such as <0xE2> are bytes

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; empty for an unknown id."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._in_letters and all(letter in byte_letters() for letter in name):
            return bytes(byte_letters()[letter] for letter in name)
        if self._has_bytes and (found := _BYTE.fullmatch(name)):
            return bytes.fromhex(found[1])
        return self._decoded(name).encode()

    def _decoded(self, name: str) -> str:
        if self._decoder is None:
            return name
        before: str = self._decoder.decode([_ANY])
        text: str = self._decoder.decode([_ANY, name])
        return text.removeprefix(before)


@cache
def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table).

    Bytes that Latin-1 can print stand for themselves; the others take the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
