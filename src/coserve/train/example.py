"""Training examples: token ids with the label of every row, their order, and their packing."""

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from coserve.errors import ConfigError, DataError
from coserve.jobs.datasets import place_of
from coserve.jobs.formats import ChatRecord, CompletionRecord, SupervisedRecord
from coserve.text.chat import encode_chat
from coserve.text.control import text_ids
from coserve.text.tokenizer import Tokenizer, first_tokens, last_tokens

IGNORED: Final = -100  # the label of rows that predict nothing, torch's and transformers' ignore_index
LossOn = Literal["assistant", "all"]


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence. `labels[i]` is the target of row i: token i + 1, or `IGNORED`."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.labels):
            raise DataError(
                f"an example has tokens and a label for each, not {len(self.tokens)} and {len(self.labels)}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def label_count(self) -> int:
        """Rows that have a label."""
        return len(self.labels) - self.labels.count(IGNORED)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tokenised data set. `truncated` examples lost their ends; `dropped` ones had no label left.

    `digest` is the SHA-256 of the examples' content and order. Prompts have `references`, one for each, that
    graders compare answers with; labelled answers are `desirable` or not. Records had keys, the first
    of them `ignored`, that are not read.
    """

    examples: tuple[Example, ...]
    truncated: int = 0
    dropped: int = 0
    digest: str = ""
    references: tuple[Mapping[str, Any], ...] = ()
    desirable: tuple[bool, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of one epoch."""
        return sum(len(example) for example in self.examples)


def digest(examples: Iterable[Example]) -> str:
    """SHA-256 of the examples' content and order."""
    found = hashlib.sha256()
    for example in examples:
        found.update(len(example).to_bytes(8, "little"))
        found.update(array("q", (*example.tokens, *example.labels)).tobytes())
    return found.hexdigest()


def tokenize(
    record: SupervisedRecord,
    tokenizer: Tokenizer,
    loss_on: LossOn = "assistant",
    max_length: int | None = None,
) -> Example:
    """A record's example, cut to `max_length` tokens if given.

    With `loss_on="assistant"` only the assistant's turns of a chat and the completion of a prompt have
    labels; with "all" every token but the first. A text has labels everywhere in both cases.
    """
    return _shifted(*_encode(record, tokenizer, loss_on), max_length)


def prepare(
    records: Iterable[SupervisedRecord],
    tokenizer: Tokenizer,
    loss_on: LossOn = "assistant",
    max_length: int | None = None,
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes all records; DataError names the place of one, or says that none has a label.

    Text that spells a control token stays text, unless `allow_special_tokens`.
    """
    _check_max_length(max_length)

    def made() -> Iterator[tuple[Example, bool]]:
        for number, record in enumerate(records, 1):
            try:
                tokens, wanted = _encode(record, tokenizer, loss_on, allow_special_tokens)
                example = _shifted(tokens, wanted, max_length)
            except DataError as error:
                raise DataError(f"{place_of(records, number)}: {error}") from error
            yield example, max_length is not None and len(tokens) > max_length

    return _prepared(made())


def prepare_examples(examples: Iterable[Example], max_length: int | None = None) -> Prepared:
    """Token examples, cut and dropped as records are by `prepare`."""
    _check_max_length(max_length)

    def made() -> Iterator[tuple[Example, bool]]:
        for example in examples:
            if max_length is None or len(example) <= max_length:
                yield example, False
            else:
                labels = (*example.labels[: max_length - 1], IGNORED)
                yield Example(example.tokens[:max_length], labels), True

    return _prepared(made())


def _prepared(made: Iterable[tuple[Example, bool]]) -> Prepared:
    """Collects (example, whether it was cut) pairs; drops examples without a label. DataError if none is
    left."""
    kept: list[Example] = []
    truncated = dropped = 0
    for example, is_cut in made:
        truncated += is_cut
        if example.label_count:
            kept.append(example)
        else:
            dropped += 1
    if not kept:
        raise DataError(f"expected at least one example with a token to learn; all {dropped} have none")
    return Prepared(tuple(kept), truncated, dropped, digest(kept))


def _check_max_length(max_length: int | None) -> None:
    if max_length is not None and max_length < 2:
        raise ConfigError(f"max_length must be at least 2 (a token and one to predict), not {max_length}")


def check_fit(prepared: Prepared, positions: int, vocabulary: int) -> None:
    """Raises DataError if an example is longer than the model's positions or has an unknown token."""
    lengths = {number: len(one) for number, one in enumerate(prepared.examples, 1) if len(one) > positions}
    if lengths:
        number = max(lengths, key=lambda number: lengths[number])
        raise DataError(
            f"example {number} has {lengths[number]} tokens, the most of {len(lengths)} among "
            f"{len(prepared.examples)} examples that are longer than the model's {positions} positions: "
            "split them, or set max_length"
        )
    for number, example in enumerate(prepared.examples, 1):
        highest = max(max(example.tokens), max(example.labels))
        if highest >= vocabulary or min(example.tokens) < 0 or min(example.labels) < IGNORED:
            raise DataError(f"example {number} has a token that is not one of the model's {vocabulary}")


def check_room(examples: Sequence[Example], positions: int, virtual: int) -> None:
    """Raises DataError if an example with an adapter's virtual tokens is longer than the model's
    positions."""
    for number, example in enumerate(examples, 1):
        if virtual + len(example) > positions:
            raise DataError(
                f"example {number} has {len(example)} tokens, which come after {virtual} of the adapter's, "
                f"and the model {positions} positions: split it, or set max_length"
            )


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Optimizer steps of one epoch; the last may be smaller."""
    return -(-examples // batch_size)


def epochs(
    examples: int, batch_size: int, epochs: int, seed: int, start: int = 0
) -> Iterator[tuple[int, ...]]:
    """Indices of the examples of each optimizer step, from step `start` on.

    Each epoch is a permutation that depends on (seed, epoch) alone, so a resumed job continues exactly as an
    uninterrupted one.
    """
    if examples < 1 or batch_size < 1 or epochs < 1 or start < 0:
        raise ConfigError("examples, batch_size and epochs must be at least 1, and start at least 0")
    first_epoch, step = divmod(start, steps_per_epoch(examples, batch_size))
    for epoch in range(first_epoch, epochs):
        order = _permutation(examples, seed, epoch)
        for at in range(step * batch_size, examples, batch_size):
            yield tuple(order[at : at + batch_size])
        step = 0


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    order = list(range(count))
    random.Random(int.from_bytes(digest, "big")).shuffle(order)
    return order


def _shifted(tokens: list[int], wanted: list[bool], max_length: int | None) -> Example:
    """`wanted[i]` tells whether token i is a target; its label belongs to the row before."""
    tokens, wanted = tokens[:max_length], wanted[:max_length]
    following = zip(tokens[1:], wanted[1:], strict=True)
    labels = [token if learned else IGNORED for token, learned in following]
    return Example(tuple(tokens), (*labels, IGNORED) if tokens else ())


def _encode(
    record: SupervisedRecord, tokenizer: Tokenizer, loss_on: LossOn, allow_special_tokens: bool = False
) -> tuple[list[int], list[bool]]:
    """(tokens, whether each is a target)."""
    if isinstance(record, ChatRecord):
        tokens, wanted = encode_chat(record.messages, tokenizer, allow_special_tokens, record.tools)
        return tokens, [True] * len(tokens) if loss_on == "all" else wanted
    encode = partial(text_ids, tokenizer, allow_special_tokens=allow_special_tokens)
    first, last = first_tokens(tokenizer), last_tokens(tokenizer)
    if isinstance(record, CompletionRecord):
        prompt, completion = _split(record, encode)
        asked, answer = [*first, *prompt], [*completion, *last]
        return asked + answer, [loss_on == "all"] * len(asked) + [True] * len(answer)
    tokens = [*first, *encode(record.text), *last]
    return tokens, [True] * len(tokens)


def _split(record: CompletionRecord, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, exactly as in a request with this prompt, and of the completion.

    Both are encoded together if that keeps the prompt's tokens (some tokenizers put a space before a text),
    and separately if a token would straddle the border: inference never samples that token.
    """
    prompt = encode(record.prompt)
    both = encode(record.prompt + record.completion)
    if both[: len(prompt)] == prompt:
        return prompt, both[len(prompt) :]
    return prompt, encode(record.completion)
