"""Grammar-constrained answers: the tokens allowed next, by llguidance.

Grammars are llguidance's text format, as from `LLMatcher.grammar_from_json_schema`. A matcher follows one
answer; once the answer is complete it allows only an end of text.

Compiling takes about 2 ms and 65 KB of memory for each KiB of a grammar, without the interpreter lock. So the
engine compiles on a thread (`engine/compiling.py`).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from coserve.errors import ConfigError, RequestError
from coserve.text.tools.lark import parse_error

# Of compiled grammars that nobody holds, since clients send the same schema again and again: how many are
# kept, and how many bytes of text these may have together, 16 MiB once they are compiled.
_KEPT: Final = 64
_KEPT_BYTES: Final = 256 << 10


class Grammar:
    """A compiled grammar, immutable."""

    __slots__ = ("__weakref__", "matcher", "text")

    def __init__(self, text: str, matcher: LLMatcher) -> None:
        self.text, self.matcher = text, matcher


class Grammars:
    """Compiles grammars for one tokenizer and a head of `vocab` tokens, of which `eos_ids` end an answer.

    Thread-safe. A grammar is not compiled again while any reference to it exists.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, list(eos_ids)
        self._vocabulary: Any = None  # llguidance's view of the tokenizer, made when it is first needed
        self._making = threading.Lock()  # of that view
        self._lock = threading.Lock()
        self._compiled: WeakValueDictionary[str, Grammar] = WeakValueDictionary()
        self._newest: OrderedDict[str, Grammar] = OrderedDict()
        self._bytes = 0  # of the texts of the newest ones

    def find(self, text: str) -> Grammar | None:
        """The compiled grammar, None if there is none."""
        with self._lock:
            if (found := self._compiled.get(text)) is not None:
                self._keep(found)
            return found

    def compile(self, text: str) -> Grammar:
        """Compiles a grammar. Raises RequestError where it is invalid."""
        if (found := self.find(text)) is not None:
            return found
        matcher = LLMatcher(self._view(), text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be compiled: {parse_error(matcher.get_error())}")
        with self._lock:
            found = self._compiled.setdefault(text, Grammar(text, matcher))
            self._keep(found)
            return found

    def check(self, text: str, output: Sequence[int] = ()) -> Grammar:
        """Compiles a grammar. Raises RequestError where it is invalid or `output` does not begin a match."""
        grammar = self.compile(text)
        if not grammar.matcher.deep_copy().consume_tokens(list(output)):
            raise RequestError("the answer so far does not match the grammar")
        return grammar

    def matcher(self, grammar: str, output: Sequence[int] = ()) -> "Matcher":
        """A matcher after `output`; both must have passed `check`."""
        found = Matcher(self.compile(grammar).matcher.deep_copy(), self._eos_ids)
        for token in output:
            found.advance(token)
        return found

    def _keep(self, grammar: Grammar) -> None:
        """Caches a grammar as the newest, and evicts the oldest ones beyond the limit."""
        if self._newest.pop(grammar.text, None) is None:
            self._bytes += len(grammar.text)
        self._newest[grammar.text] = grammar
        while len(self._newest) > _KEPT or (self._bytes > _KEPT_BYTES and len(self._newest) > 1):
            self._bytes -= len(self._newest.popitem(last=False)[0])

    def _view(self) -> Any:
        with self._making:
            if self._vocabulary is None:
                if not getattr(self._tokenizer, "is_fast", False) or not self._eos_ids:
                    raise ConfigError("grammars need a fast tokenizer and a token that ends a text")
                known = max(self._vocab, len(self._tokenizer))
                try:
                    self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=known, eos_token=self._eos_ids)
                except ValueError as error:
                    raise ConfigError(f"grammars do not go with this tokenizer: {error}") from error
            return self._vocabulary


class Matcher:
    """State of one answer in its grammar.

    An answer whose parsing exceeds llguidance's limits ends there.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids

    def allowed(self, vocab: int, device: torch.device, ahead: Sequence[int] = ()) -> Tensor:
        """[vocab] bool: the tokens that may come next, behind those `ahead`. At least one is true; all are
        behind tokens that may not come."""
        mask, matcher = torch.zeros(vocab, dtype=torch.bool), self._matcher
        if ahead:
            matcher = matcher.deep_copy()
            if matcher.validate_tokens(list(ahead)) < len(ahead) or not matcher.consume_tokens(list(ahead)):
                return torch.ones(vocab, dtype=torch.bool, device=device)
        if not matcher.is_stopped():
            found = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
            mask = found[:vocab] > 0
        if matcher.is_stopped():  # possibly by the last token
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[self._eos_ids] = True
        return mask.to(device)

    def advance(self, token: int) -> None:
        """Advances by the answer's next token, which must be allowed."""
        self._matcher.consume_token(token)
