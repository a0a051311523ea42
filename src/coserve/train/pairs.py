"""Pairs of answers for preference training: token ids with the label of every row."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from coserve.errors import TurnsRewritten
from coserve.jobs.datasets import each_made
from coserve.jobs.formats import PreferenceRecord
from coserve.jobs.messages import Message, Tools
from coserve.text.chat import encode_chat, encode_prompt
from coserve.text.tokenizer import Tokenizer
from coserve.train.example import IGNORED, Example, Prepared, digest
from coserve.train.lengths import Cutter, LengthLimit


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Two answers to one prompt, of which `chosen` is preferred, each with its prompt."""

    chosen: Example
    rejected: Example


def prepare_pairs(
    pairs: Iterable[TokenPair | PreferenceRecord],
    tokenizer: Tokenizer | None,
    limit: LengthLimit = LengthLimit(),
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes records, token pairs stay as they are, and applies the limit. An example of the data is two
    of `Prepared`: the preferred answer, then the other. Only tokens of the answers have labels, and only
    answers are cut.

    Pairs of which an answer has no label left, or whose answers are equal, are left out. DataError names the
    place of a record.
    """
    kept, cutter = list[Example](), Cutter(limit)
    for made, place in each_made(pairs, lambda one: _tokens_of(one, tokenizer, allow_special_tokens)):
        kept += cutter.take((made.chosen, made.rejected), place)
    return Prepared(tuple(kept), cutter.counts, digest=digest(kept))


def _tokens_of(
    record: TokenPair | PreferenceRecord, tokenizer: Tokenizer | None, allow_special_tokens: bool
) -> TokenPair:
    if isinstance(record, TokenPair):
        return record
    assert tokenizer is not None, "records are text"
    prompt, tools = record.prompt, record.tools
    chosen, rejected = encode_answers(
        prompt, (record.chosen, record.rejected), tokenizer, allow_special_tokens, tools
    )
    return TokenPair(chosen, rejected)


def encode_answers(
    prompt: tuple[Message, ...],
    answers: Iterable[tuple[Message, ...]],
    tokenizer: Tokenizer,
    allow_special_tokens: bool,
    tools: Tools,
) -> list[Example]:
    """The prompt with each of the answers to it, with labels for what the assistant says in the answer."""
    before = len(encode_prompt(prompt, tokenizer, allow_special_tokens, tools))
    return [
        _answer((*prompt, *answer), len(prompt), before, tokenizer, allow_special_tokens, tools)
        for answer in answers
    ]


def _answer(
    messages: tuple[Message, ...],
    prompt: int,
    before: int,
    tokenizer: Tokenizer,
    allow_special_tokens: bool,
    tools: Tools,
) -> Example:
    """A chat whose first `prompt` messages and `before` tokens are the prompt's, with labels for what the
    assistant says after."""
    try:
        tokens, wanted = encode_chat(messages, tokenizer, allow_special_tokens, tools)
    except TurnsRewritten:  # of the prompt: those of the answer are served one after the other
        first = next(n for n, one in enumerate(messages) if n >= prompt and one.role == "assistant")
        silent = tuple(replace(one, weight=0) for one in messages[:first])
        tokens, wanted = encode_chat((*silent, *messages[first:]), tokenizer, allow_special_tokens, tools)
    labels = [
        token if learned and row >= before else IGNORED
        for row, (token, learned) in enumerate(zip(tokens, wanted, strict=True))
    ]
    return Example(tuple(tokens), (*labels[1:], IGNORED))
