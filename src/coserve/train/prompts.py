"""Prompts for reinforcement: token ids, and the reference that a grader compares answers with."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coserve.errors import DataError
from coserve.jobs.datasets import place_of
from coserve.jobs.formats import PromptRecord
from coserve.text.chat import encode_prompt
from coserve.text.tokenizer import Tokenizer
from coserve.train.example import IGNORED, Example, Prepared, digest
from coserve.train.grading.graders import Grader


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt's tokens and its reference."""

    tokens: tuple[int, ...]
    reference: Mapping[str, Any] = field(default_factory=dict)


def prepare_prompts(
    prompts: Iterable[TokenPrompt | PromptRecord],
    tokenizer: Tokenizer | None,
    grader: Grader,
    max_length: int | None = None,
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes records; token prompts stay as they are. Examples have no labels. Prompts of more than
    `max_length` tokens are dropped: cut ones would ask something else. DataError names the place of a
    record that the grader cannot grade, or says that none is left.
    """
    kept: list[Example] = []
    references: list[Mapping[str, Any]] = []
    dropped = 0
    for number, prompt in enumerate(prompts, 1):
        try:
            made = (
                prompt
                if isinstance(prompt, TokenPrompt)
                else _tokens_of(prompt, tokenizer, allow_special_tokens)
            )
            grader.check(made.reference)
        except DataError as error:
            raise DataError(f"{place_of(prompts, number)}: {error}") from error
        if not made.tokens or (max_length is not None and len(made.tokens) > max_length):
            dropped += 1
            continue
        kept.append(Example(made.tokens, (IGNORED,) * len(made.tokens)))
        references.append(made.reference)
    if not kept:
        raise DataError(f"expected at least one prompt; all {dropped} are longer than max_length, or empty")
    found = hashlib.sha256(digest(kept).encode())
    found.update(msgspec.json.encode([dict(one) for one in references], order="deterministic"))
    return Prepared(tuple(kept), 0, dropped, found.hexdigest(), tuple(references))


def _tokens_of(record: PromptRecord, tokenizer: Tokenizer | None, allow_special_tokens: bool) -> TokenPrompt:
    assert tokenizer is not None, "records are text"
    tokens = encode_prompt(record.messages, tokenizer, allow_special_tokens, record.tools)
    return TokenPrompt(tuple(tokens), record.reference)
