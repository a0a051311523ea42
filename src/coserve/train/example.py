"""Training examples: token ids with the label of every row, what became of a data set's, and their order."""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from coserve.errors import ConfigError, DataError

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


@dataclass(slots=True)
class ExampleCounts:
    """A data set's examples, pairs or prompts by what became of them.

    `lengths` are those of all of them in tokens, as they came; of a pair that of its longer answer. `over` of
    them are longer than the limit, the longest is at `place`. Of these `truncated` lost their ends, `skipped`
    were left out, and `split` texts became so many `pieces`. `dropped` are others with nothing to learn.
    """

    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    over: int = 0
    longest: int = 0
    place: str = ""
    truncated: int = 0
    skipped: int = 0
    split: int = 0
    pieces: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tokenised data set, and the `counts` of what became of its examples. Its records came from a
    `container` and had a `format`; `is_whole` tells whether all were read.

    `digest` is the SHA-256 of the examples' content and order. Prompts have `references`, one for each, that
    graders compare answers with; labelled answers are `desirable` or not. Records had keys, the first
    of them `ignored`, that are not read.
    """

    examples: tuple[Example, ...]
    counts: ExampleCounts = field(default_factory=ExampleCounts)
    digest: str = ""
    references: tuple[Mapping[str, Any], ...] = ()
    desirable: tuple[bool, ...] = ()
    ignored: tuple[str, ...] = ()
    container: str = ""
    format: str = ""
    is_whole: bool = True

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


def check_tokens(prepared: Prepared, vocabulary: int) -> None:
    """Raises DataError if an example has an unknown token."""
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
                f"and the model {positions} positions: prepare the data for a shorter max_length"
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
