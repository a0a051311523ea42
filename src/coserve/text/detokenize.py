"""Streaming detokenizer: emits whole characters, and holds back possible stop strings."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from tokenizers.decoders import DecodeStream

from coserve.errors import ConfigError
from coserve.text.pending import begun
from coserve.text.tokenizer import Tokenizer

_ENDING: Final = 32  # tokens of a prompt that are looked at for its last character
_NO_CHARACTER: Final = "\ufffd"  # for bytes that are none
NO_TOKENS: Final[Mapping[int, str]] = MappingProxyType({})


class StopMatcher:
    """Finds stop strings in text that arrives in pieces.

    The first stop string to be *complete* ends the text (of several that are complete with the same
    character, the longest), and the text is cut before it, or behind it where it `has_stop`. The outcome
    therefore does not depend on where the pieces are cut.
    """

    def __init__(self, stops: Sequence[str] = (), has_stop: bool = False) -> None:
        if "" in stops:
            raise ConfigError("sampling.stop must not contain an empty string")
        self._stops, self._has_stop = tuple(stops), has_stop
        self._held = ""  # the longest end of the text so far that a stop string could begin with
        self.matched: str | None = None  # the stop string that has ended the text

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """Adds a piece; returns the text that cannot belong to a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        if (found := self._first_match(text)) is not None:
            start, end = found
            self.matched, self._held = text[start:end], ""
            return text[: end if self._has_stop else start]
        undecided = self._undecided(text)
        self._held = text[len(text) - undecided :]
        return text[: len(text) - undecided]

    def finish(self) -> str:
        """Returns the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the first complete stop string; None if there is none."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        return max((begun(stop, text) for stop in self._stops), default=0)


class TextStream:
    """The text of one answer, token by token.

    All that `push` and `finish` return, joined, is what the tokenizer decodes all tokens to (special tokens
    skipped, spaces left alone), cut before the first stop string, or behind it where it `has_stop`. With
    `after`, the preceding tokens, the text is what the answer adds to theirs: many tokenizers drop a space at
    the beginning of a text only. The special tokens `kept` are told as they are spelled; the text after one
    is decoded by itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
        kept: Mapping[int, str] = NO_TOKENS,
        has_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._tokens = self._ending(after)
        before = self._decode()
        self._before = len(before)
        self._decoder = DecodeStream(ids=list(self._tokens), skip_special_tokens=True)
        self._matcher = StopMatcher(stops, has_stop)
        self._given = 0  # characters that the decoder has given of `_tokens`
        self._decoded = 0  # characters of all tokens that it has given

    @property
    def stopped(self) -> bool:
        """Tells whether a stop string has ended the text."""
        return self._matcher.stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

    @property
    def length(self) -> int:
        """Characters of all tokens so far, held-back ones included."""
        return self._decoded

    def push(self, token: int) -> str:
        """The text that is safe to emit after one more token; often empty."""
        if self.stopped:
            return ""
        if token in self._kept:
            text = self._rest() + self._kept[token]
            self._tokens, self._before, self._given = [], 0, 0
            self._decoder = DecodeStream(skip_special_tokens=True)
        else:
            self._tokens.append(token)
            text = self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
            self._given += len(text)
        self._decoded += len(text)
        return self._matcher.push(text)

    def finish(self) -> str:
        """Gives the rest: incomplete characters (as U+FFFD) and text held back for a stop string."""
        if self.stopped:
            return ""
        # Only the decoder's own tail is missing; it has no way to ask for it.
        text = self._matcher.push(self._rest())
        self._tokens, self._before, self._given, self._decoded = [], 0, 0, 0
        return text if self.stopped else text + self._matcher.finish()

    def _rest(self) -> str:
        """The text of `_tokens` that the decoder holds back: incomplete characters."""
        return self._decode()[self._before + self._given :]

    def _ending(self, after: Sequence[int]) -> list[int]:
        """The last tokens of `after` that form whole characters (special tokens form none). None where it
        ends within a character, which is not continued."""
        added = self._tokenizer.added_tokens_decoder
        kept = [token for token in after[-_ENDING:] if not (token in added and added[token].special)]
        for count in range(1, len(kept) + 1):
            self._tokens = kept[-count:]
            text = self._decode()
            if text and _NO_CHARACTER not in text:
                return self._tokens
        return []

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
