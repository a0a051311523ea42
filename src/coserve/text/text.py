"""Text and tokens of one model outside training: used by the engine and the server."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError, DataError
from coserve.text.chat import encode_request
from coserve.text.control import control_tokens
from coserve.text.detokenize import NO_TOKENS, TextStream
from coserve.text.markup import Markups
from coserve.text.rendering import NO_VARIABLES, Tools, Turns, Variables
from coserve.text.tokenizer import Tokenizer, first_tokens, load_tokenizer

_ANY: Final = "a"  # a token before, so that nothing is special about being the first
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_log = logging.getLogger(__name__)


class TokenBytes:
    """Maps tokens, special ones included, to bytes. A token may be a part of a character."""

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

    def text_of(self, token: int) -> str:
        """A token's text, with backslash escapes (`\\xf0\\x9f`) for bytes that are no whole character."""
        return self.bytes_of(token).decode(errors="backslashreplace")

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


class Text:
    """Prompts and chats to token ids, and token ids to text. Thread-safe.

    Spelled control tokens in prompts and messages are text, unless `allow_special_tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, allow_special_tokens: bool = False, tool_format: str | None = None
    ) -> None:
        """`tool_format` names the format of calls where the template does not tell it."""
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(f"{type(tokenizer).__name__} cannot stream text: it is not a fast tokenizer")
        self.tokenizer = tokenizer
        self.allow_special_tokens = allow_special_tokens
        self.markups = Markups(tokenizer, tool_format)
        self.tokens = TokenBytes(tokenizer)
        self.firsts = tuple(first_tokens(tokenizer))  # that stand before every text

    @classmethod
    def load(
        cls, model: str | Path, allow_special_tokens: bool = False, tool_format: str | None = None
    ) -> "Text":
        """Loads the tokenizer saved beside a model, in a folder or on the hub; raises ConfigError."""
        return cls(load_tokenizer(model), allow_special_tokens, tool_format)

    @cached_property
    def special(self) -> Mapping[int, str]:
        """Special tokens as they are spelled, which texts leave out."""
        added = self.tokenizer.added_tokens_decoder
        return {token: one.content for token, one in added.items() if one.special}

    def prepare(self) -> None:
        """Builds the tokenizer copy that texts with spelled control tokens need (a second for large
        vocabularies), and starts the sandbox that renders chats. A template that takes too long is logged."""
        if not self.allow_special_tokens:
            control_tokens(self.tokenizer).prepare()
        if self.tokenizer.chat_template is not None:
            try:
                self.chat([{"role": "user", "content": "Hello"}])
            except DataError as error:  # it may take other chats
                _log.warning("a chat of one message cannot be answered: %s", error)

    def encode(self, prompt: str, special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the `special` tokens that the tokenizer puts at its ends, such as one
        for the beginning of a text.

        Raises DataError for a control token's spelling that the tokenizer cannot encode as text.
        """
        if not self.allow_special_tokens and (control := control_tokens(self.tokenizer)).spelled_in(prompt):
            return tuple(control.text_ids(prompt, add_special_tokens=special))
        return tuple(self.tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])

    def chat(
        self,
        messages: Turns,
        tools: Tools = (),
        variables: Variables = NO_VARIABLES,
        is_continued: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a chat with the generation prompt, as in training, or of one whose last message
        `is_continued`. The template reads further `variables`.

        Messages have "role" and "content". Raises DataError for a chat that the template refuses.
        """
        allowed = self.allow_special_tokens
        return tuple(encode_request(messages, self.tokenizer, allowed, tools, variables, is_continued))

    def stream(
        self,
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
        kept: Mapping[int, str] = NO_TOKENS,
        has_stop: bool = False,
    ) -> TextStream:
        """The text of one answer, token by token; it ends before the first of `stops`, or behind it where it
        `has_stop`.

        `after` are tokens that the answer continues, if any, and `kept` special tokens that are part of it.
        """
        return TextStream(self.tokenizer, stops, after, kept, has_stop)

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of tokens, with `special` ones or without; spaces are left alone."""
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def starts(self, tokens: Iterable[int]) -> list[int]:
        """Offset of each token's text in `decode(tokens)`, in characters."""
        stream, found = self.stream(), []
        for token in tokens:
            found.append(stream.length)
            stream.push(token)
        return found
