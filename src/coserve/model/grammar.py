"""Answers that must match a grammar: which tokens may come next, by llguidance.

Grammars are llguidance's own text, such as `LLMatcher.grammar_from_json_schema` gives it. A matcher follows
one answer; it knows when the answer is complete, and then allows nothing but an end of text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from coserve.errors import ConfigError, RequestError

_KEPT = 64  # compiled grammars; clients send the same schema again and again


class Grammars:
    """Compiles grammars for one tokenizer and a head of `vocab` tokens, of which `eos_ids` end an answer."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, list(eos_ids)
        self._vocabulary: Any = None  # llguidance's view of the tokenizer, made when it is first needed
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def check(self, grammar: str, output: Sequence[int] = ()) -> None:
        """Raises RequestError where the grammar cannot be compiled, or `output` does not begin a match."""
        if not self._compile(grammar).deep_copy().consume_tokens(list(output)):
            raise RequestError("the answer so far does not match the grammar")

    def matcher(self, grammar: str, output: Sequence[int] = ()) -> "Matcher":
        """A matcher at the end of `output`; both were checked."""
        found = Matcher(self._compile(grammar).deep_copy(), self._eos_ids)
        for token in output:
            found.advance(token)
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        compiled = LLMatcher(self._view(), grammar, log_level=0)
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_first_line(compiled.get_error())}")
        self._compiled[grammar] = compiled
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return compiled

    def _view(self) -> Any:
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
    """Where one answer stands in its grammar.

    llguidance gives up on an answer whose parsing outgrows its limits: such an answer ends there.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids

    def allowed(self, vocab: int, device: torch.device) -> Tensor:
        """[vocab] bool: the tokens that may come next; at least one of them is true."""
        mask = torch.zeros(vocab, dtype=torch.bool)
        if not self._matcher.is_stopped():
            found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            mask = found[:vocab] > 0
        if self._matcher.is_stopped():  # which it may have found out just now
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[self._eos_ids] = True
        return mask.to(device)

    def advance(self, token: int) -> None:
        """Takes the next token of the answer, one of those that were allowed."""
        self._matcher.consume_token(token)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
