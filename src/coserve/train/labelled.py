"""Single answers that are desirable or not, for KTO: token ids with the label of every row."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from coserve.jobs.datasets import each_made
from coserve.jobs.formats import LabelledRecord
from coserve.text.tokenizer import Tokenizer
from coserve.train.example import IGNORED, Example, Prepared, digest
from coserve.train.lengths import Cutter, LengthLimit, cut
from coserve.train.pairs import encode_answers


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """An answer with its prompt, and whether it is desirable. Labels begin with the answer's first token."""

    example: Example
    desirable: bool


def prepare_labelled(
    answers: Iterable[TokenAnswer | LabelledRecord],
    tokenizer: Tokenizer | None,
    limit: LengthLimit = LengthLimit(),
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes records, token answers stay as they are, and applies the limit. An example of the data is two
    of `Prepared`: the answer, and the one before it in the data after the same prompt (before the first comes
    the last). With the second ones a step estimates the divergence from the reference, as TRL does.

    Answers without a label are left out, and all where fewer than two are left. DataError names the place of
    a record.
    """
    kept: list[Example] = []
    desirable: list[bool] = []
    cutter = Cutter(limit)
    for made, place in each_made(answers, lambda one: _tokens_of(one, tokenizer, allow_special_tokens)):
        for example in cutter.take((made.example,), place):
            kept.append(example)
            desirable.append(made.desirable)
    if len(kept) < 2:
        return Prepared((), cutter.counts)
    longest = max(map(len, kept))
    examples = [
        example
        for own, before in zip(kept, (kept[-1], *kept), strict=False)
        for example in (own, cut(_mismatched(own, before), longest))
    ]
    found = hashlib.sha256(digest(examples).encode())
    found.update(bytes(desirable))
    return Prepared(tuple(examples), cutter.counts, digest=found.hexdigest(), desirable=tuple(desirable))


def _tokens_of(
    record: TokenAnswer | LabelledRecord, tokenizer: Tokenizer | None, allow_special_tokens: bool
) -> TokenAnswer:
    if isinstance(record, TokenAnswer):
        return record
    assert tokenizer is not None, "records are text"
    (example,) = encode_answers(
        record.prompt, (record.answer,), tokenizer, allow_special_tokens, record.tools
    )
    return TokenAnswer(example, record.desirable)


def _mismatched(own: Example, other: Example) -> Example:
    """The prompt of one example with the answer of another."""
    mine, others = _answer_begins(own), _answer_begins(other)
    return Example(
        (*own.tokens[:mine], *other.tokens[others:]), (*own.labels[: mine - 1], *other.labels[others - 1 :])
    )


def _answer_begins(example: Example) -> int:
    """Index of the first token that is learned: the row before has its label."""
    return 1 + next(row for row, label in enumerate(example.labels) if label != IGNORED)
