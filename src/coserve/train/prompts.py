"""Prompts for reinforcement: token ids, and the reference that a grader compares answers with."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coserve.errors import ConfigError
from coserve.jobs.datasets import each_made
from coserve.jobs.formats import PromptRecord
from coserve.text.chat import encode_prompt
from coserve.text.tokenizer import Tokenizer
from coserve.train.example import IGNORED, Example, Prepared, digest
from coserve.train.grading.graders import Grader
from coserve.train.lengths import CUT_PROMPT, Cutter, LengthLimit


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt's tokens and its reference."""

    tokens: tuple[int, ...]
    reference: Mapping[str, Any] = field(default_factory=dict)


def prepare_prompts(
    prompts: Iterable[TokenPrompt | PromptRecord],
    tokenizer: Tokenizer | None,
    grader: Grader,
    limit: LengthLimit = LengthLimit(),
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes records, token prompts stay as they are, and applies the limit. Examples have no labels.
    DataError names the place of a record that the grader cannot grade. Raises ConfigError for a limit that
    cuts.
    """
    if limit.too_long == "truncate":
        raise ConfigError(CUT_PROMPT.format(limit.names.too_long))
    kept: list[Example] = []
    references: list[Mapping[str, Any]] = []
    cutter = Cutter(limit)

    def tokens_of(prompt: TokenPrompt | PromptRecord) -> TokenPrompt:
        made = _tokens_of(prompt, tokenizer, allow_special_tokens)
        grader.check(made.reference)
        return made

    for made, place in each_made(prompts, tokens_of):
        if cutter.take_prompt(len(made.tokens), place):
            kept.append(Example(made.tokens, (IGNORED,) * len(made.tokens)))
            references.append(made.reference)
    found = hashlib.sha256(digest(kept).encode())
    found.update(msgspec.json.encode([dict(one) for one in references], order="deterministic"))
    return Prepared(tuple(kept), cutter.counts, digest=found.hexdigest(), references=tuple(references))


def _tokens_of(
    record: TokenPrompt | PromptRecord, tokenizer: Tokenizer | None, allow_special_tokens: bool
) -> TokenPrompt:
    if isinstance(record, TokenPrompt):
        return record
    assert tokenizer is not None, "records are text"
    tokens = encode_prompt(record.messages, tokenizer, allow_special_tokens, record.tools)
    return TokenPrompt(tuple(tokens), record.reference)
