"""Single answers that are desirable or not, for KTO: token ids with the label of every row."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from coserve.errors import DataError
from coserve.jobs.datasets import place_of
from coserve.jobs.formats import LabelledRecord
from coserve.text.tokenizer import Tokenizer
from coserve.train.example import IGNORED, Example, Prepared, digest
from coserve.train.pairs import cut, encode_answers


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """An answer with its prompt, and whether it is desirable. Labels begin with the answer's first token."""

    example: Example
    desirable: bool


def prepare_labelled(
    answers: Iterable[TokenAnswer | LabelledRecord],
    tokenizer: Tokenizer | None,
    max_length: int | None = None,
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes records; token answers stay as they are. An example of the data is two of `Prepared`: the
    answer, and the one before it in the data after the same prompt (before the first comes the last). With
    the second ones a step estimates the divergence from the reference, as TRL does.

    Answers without a label are dropped. DataError names the place of one, or says that fewer than two are
    left.
    """
    kept: list[Example] = []
    desirable: list[bool] = []
    truncated = dropped = 0
    for number, answer in enumerate(answers, 1):
        try:
            made = (
                answer
                if isinstance(answer, TokenAnswer)
                else _tokens_of(answer, tokenizer, allow_special_tokens)
            )
        except DataError as error:
            raise DataError(f"{place_of(answers, number)}: {error}") from error
        example, is_cut = cut(made.example, max_length)
        truncated += is_cut
        if example.label_count:
            kept.append(example)
            desirable.append(made.desirable)
        else:
            dropped += 1
    if len(kept) < 2:
        raise DataError(
            "expected at least two answers with tokens to learn, as KTO compares each prompt with the answer "
            f"to another; found {len(kept)}, beside {dropped} without"
        )
    longest = max(map(len, kept))
    examples = [
        example
        for own, before in zip(kept, (kept[-1], *kept), strict=False)
        for example in (own, cut(_mismatched(own, before), longest)[0])
    ]
    found = hashlib.sha256(digest(examples).encode())
    found.update(bytes(desirable))
    return Prepared(tuple(examples), truncated, dropped, found.hexdigest(), desirable=tuple(desirable))


def _tokens_of(
    record: LabelledRecord, tokenizer: Tokenizer | None, allow_special_tokens: bool
) -> TokenAnswer:
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
