"""Control tokens: written by templates only; text that spells one stays text.

A tokenizer's special tokens (`<|end|>`, `</s>`) mark speakers and ends of turns. A tokenizer recognises their
spelling anywhere, so a user could end their own turn and speak as the system. Therefore spellings in a
message are replaced by stand-ins while the template is rendered; those in the rendered chat are then the
template's. A copy of the tokenizer that treats special tokens as text encodes the whole. In it the template's
control tokens are guards: added tokens whose names contain a secret of this process, so that no message can
spell them.

Text without such spellings is encoded by the tokenizer itself.
"""

import re
import secrets
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from coserve.errors import DataError
from coserve.text.tokenizer import Tokenizer, token_ids

# Characters for private use: no template strips, splits or changes the case of them.
_SECRET: Final = range(0xF0000, 0xFFFFE)  # of which 8 are 128 bits
_NUMBER: Final = 0x100000  # the first of another 65,534, which number the control tokens
_UNASSIGNED: Final = "\u0378"


def _secret() -> str:
    return "".join(chr(secrets.choice(_SECRET)) for _ in range(8))


class Anchor(NamedTuple):
    """A control token in a text, from character `start` to `end`, which is number `place` of its tokens.
    Tokenizers cut a text at control tokens, so from there on it has the same tokens with or without what is
    before."""

    start: int
    end: int
    place: int


class TokenPlaces(Protocol):
    """The places of a text's tokens among its characters."""

    def token_to_chars(self, token: int, /) -> Sequence[int] | None:
        """Start and end of a token; None for one that stands for no character."""
        ...

    def char_to_token(self, place: int, /) -> int | None:
        """The token that has the character at this place."""
        ...


class ControlTokens:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._special: dict[int, AddedToken] = {id: token for id, token in added.items() if token.special}
        self._ids = list(self._special)
        self._number = {token.content: n for n, token in enumerate(self._special.values())}
        self._pattern = _any_of(list(self._number))
        folded = [token.content for token in self._special.values() if token.normalized]
        # A normalized one is found in normalized text: "<S>" is "<s>" where the normalizer lowers letters.
        self._folded = None
        if backend is not None and backend.normalizer is not None:
            self._folded = _any_of([backend.normalizer.normalize_str(content) for content in folded])
        self._stand_in, self._guard = _secret(), _secret()
        self._hidden = re.compile(f"{self._stand_in}(.)", re.DOTALL)
        self._lock = threading.Lock()

    def spelled_in(self, text: str) -> bool:
        """Tells whether `text` spells a control token."""
        if self._pattern is not None and self._pattern.search(text):
            return True
        return self._folded is not None and bool(
            self._folded.search(self._backend.normalizer.normalize_str(text))
        )

    def hide(self, text: str) -> str:
        """`text` with a stand-in for each control token that it spells."""
        return self._renamed(text, self._stand_in)

    def show(self, text: str) -> str:
        """`text` with its stand-ins replaced by the original spellings."""
        return self._hidden.sub(lambda found: self._special[self._ids[_number(found[1])]].content, text)

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`: stand-ins are text, and spelled control tokens are control tokens.

        `add_special_tokens` adds those that the tokenizer puts at the ends of every text. Raises DataError
        where the vocabulary itself maps a spelling to a control token.
        """
        return self._encoded(text, add_special_tokens)[0]

    def _encoded(self, text: str, add_special_tokens: bool = False) -> tuple[list[int], TokenPlaces]:
        """Token ids as `ids` has them, and their places in the text that has no stand-ins."""
        copy, guards = self._copied()
        written = self.show(self._renamed(text, self._guard))
        encoded = copy.encode(written, add_special_tokens=add_special_tokens)
        found = []
        for id, is_end in zip(encoded.ids, encoded.special_tokens_mask, strict=True):
            if id in self._special and not is_end and id not in self._unknown:
                raise DataError(
                    f"the text spells the control token {self._special[id].content!r}, and this model's "
                    "tokenizer cannot take that for text: leave it out, or start the server with "
                    "--allow-special-tokens"
                )
            found.append(guards.get(id, id))
        return found, encoded

    def text_ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; text that spells a control token is plain text."""
        return self.ids(self.hide(text), add_special_tokens)

    def text_encoding(self, text: str) -> tuple[list[int], TokenPlaces]:
        """Token ids as `text_ids` has them, and their places in `text`."""
        return self._encoded(self.hide(text))

    def anchors(self, text: str, ids: list[int]) -> list[Anchor]:
        """The control tokens in a text that has these token ids, in order; none where it is not clear which
        token is which, or one takes up the white space around it."""
        if self._pattern is None:
            return []
        found = list(self._pattern.finditer(text))
        places = [(index, id) for index, id in enumerate(ids) if id in self._special]
        if [match[0] for match in found] != [self._special[id].content for _, id in places]:
            return []
        if any(token.lstrip or token.rstrip or token.single_word for token in self._special.values()):
            return []
        return [
            Anchor(match.start(), match.end(), index) for match, (index, _) in zip(found, places, strict=True)
        ]

    def prepare(self) -> None:
        """Makes the copy of the tokenizer in advance: a second for a vocabulary of 128,000."""
        if self._special:
            self._copied()

    def _renamed(self, text: str, secret: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: secret + chr(_NUMBER + self._number[found[0]]), text)

    def _copied(self) -> tuple[Any, dict[int, int]]:
        with self._lock:
            return self._copy

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer that treats special tokens as text; and the id of each guard's control token."""
        copy: Any = Backend.from_str(self._backend.to_str())
        copy.encode_special_tokens = True  # a tokenizer's state, so not for a moment in the shared one
        copy.no_truncation()
        copy.no_padding()
        names = [self._guard + chr(_NUMBER + number) for number in range(len(self._ids))]
        copy.add_tokens([
            AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
            for name, token in zip(names, self._special.values(), strict=True)
        ])  # fmt: skip
        return copy, {copy.token_to_id(name): id for name, id in zip(names, self._ids, strict=True)}

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """Ids that encode a character outside of the vocabulary: special tokens that stand for text."""
        copy, _ = self._copied()
        return frozenset(copy.encode(_UNASSIGNED, add_special_tokens=False).ids)


_KNOWN: "WeakKeyDictionary[Any, ControlTokens]" = WeakKeyDictionary()
_KNOWN_LOCK = threading.Lock()


def control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    """Control tokens of a tokenizer, cached by tokenizer; empty for one that is not a fast tokenizer."""
    with _KNOWN_LOCK:
        if (found := _KNOWN.get(tokenizer)) is None:
            found = _KNOWN[tokenizer] = ControlTokens(getattr(tokenizer, "backend_tokenizer", None))
    return found


def text_ids(tokenizer: Tokenizer, text: str, allow_special_tokens: bool = False) -> list[int]:
    """Token ids of `text`, without added tokens at its ends. Spelled control tokens are text, unless
    allowed."""
    if not allow_special_tokens and (control := control_tokens(tokenizer)).spelled_in(text):
        return control.text_ids(text)
    return token_ids(tokenizer, text)


def text_encoding(
    tokenizer: Tokenizer, text: str, allow_special_tokens: bool = False
) -> tuple[list[int], TokenPlaces | None]:
    """Token ids as `text_ids` has them, and their places; None for a tokenizer that does not know these."""
    if not allow_special_tokens and (control := control_tokens(tokenizer)).spelled_in(text):
        return control.text_encoding(text)
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"]), encoded.encodings[0] if tokenizer.is_fast else None


def _any_of(spellings: list[str]) -> "re.Pattern[str] | None":
    """A pattern that matches the longest of these spellings, as the tokenizer does; None without any."""
    ordered = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _number(character: str) -> int:
    return ord(character) - _NUMBER
