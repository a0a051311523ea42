"""Examples that are longer than a job takes: refused, left out or cut, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from coserve.errors import ConfigError, DataError
from coserve.train.example import IGNORED, Example, ExampleCounts, Prepared

TooLong = Literal["error", "skip", "truncate"]
CUT_PROMPT: Final = "A prompt that is cut asks something else: for reinforcement {} is 'error' or 'skip'"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the two settings where a person gives them. Without `too_long` longer examples are cut
    once `max_length` is given."""

    max_length: str = "training.max_length"
    too_long: str | None = "training.too_long"


USUAL_NAMES: Final = Names()


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens of an example (`most`, None for any number) and what becomes of longer ones. Plain
    texts are cut into pieces whatever `too_long` says. Errors call the limit `whose`."""

    most: int | None = None
    too_long: TooLong = "error"
    whose: str = ""
    is_models: bool = False  # rather than the job's own
    names: Names = USUAL_NAMES

    def __post_init__(self) -> None:
        if not self.is_models and self.most is not None and self.most < 2:
            message = f"{self.names.max_length} must be at least 2 (a token and one to predict)"
            raise ConfigError(f"{message}, not {self.most}")


def limit_of(
    max_length: int | None, too_long: TooLong, positions: int, reserved: int = 0, names: Names = USUAL_NAMES
) -> LengthLimit:
    """The limit of a job on a model of so many positions, of which the adapter's virtual tokens and an answer
    take `reserved`."""
    most = positions - reserved
    if max_length is not None and max_length <= most:
        return LengthLimit(max_length, too_long, f"{names.max_length} {max_length}", names=names)
    whose = f"the model's {positions} positions"
    if reserved:
        whose = f"the {most} of {whose} that virtual tokens and answers leave"
    return LengthLimit(most, too_long, whose, is_models=True, names=names)


class Cutter:
    """Applies a limit to one example, pair or prompt after another, and counts."""

    def __init__(self, limit: LengthLimit) -> None:
        self.counts = ExampleCounts()
        self._limit = limit

    def take(self, unit: tuple[Example, ...], place: str) -> tuple[Example, ...]:
        """The unit as it is trained; empty where it is left out. One is cut at its end, as long as each of
        its examples has something to learn then, and those of a pair differ."""
        if not self._is_over(max(map(len, unit)), place):
            if teaches(unit):
                return unit
            self.counts.dropped += 1
            return ()
        if self._limit.too_long == "truncate":
            short = tuple(cut(example, self._limit.most) for example in unit)
            if teaches(short):
                self.counts.truncated += 1
                return short
        self.counts.skipped += 1
        return ()

    def take_pieces(self, pieces: Sequence[Example], length: int, has_begun: bool = False) -> list[Example]:
        """The pieces of a text of `length` tokens that was cut, or of one more part of the text before;
        those of one token have nothing to learn."""
        if has_begun:
            self.counts.lengths[-1] += length
        else:
            self.counts.lengths.append(length)
            self.counts.split += 1
        found = [piece for piece in pieces if piece.label_count]
        self.counts.pieces += len(found)
        return found

    def take_prompt(self, length: int, place: str) -> bool:
        """Tells whether a prompt of `length` tokens is asked; no prompt is cut."""
        if length and not self._is_over(length, place):
            return True
        self.counts.skipped += length > 0
        self.counts.dropped += length == 0
        return False

    def _is_over(self, length: int, place: str) -> bool:
        counts = self.counts
        counts.lengths.append(length)
        if self._limit.most is None or length <= self._limit.most:
            return False
        counts.over += 1
        if length > counts.longest:
            counts.longest, counts.place = length, place
        return True


def teaches(unit: tuple[Example, ...]) -> bool:
    """Tells whether each example has something to learn, and those of a pair differ."""
    return all(example.label_count for example in unit) and len(set(unit)) == len(unit)


def cut(example: Example, most: int | None) -> Example:
    """The example's first `most` tokens."""
    if most is None or len(example) <= most:
        return example
    if most < 1:
        return Example(example.tokens[:1], (IGNORED,))
    return Example(example.tokens[:most], (*example.labels[: most - 1], IGNORED))


def check_lengths_of(prepared: Prepared, limit: LengthLimit) -> None:
    """Raises DataError where the limit refuses examples, or none is left to learn from."""
    counts = prepared.counts
    total = f"{'' if prepared.is_whole else 'the first '}{_number(len(counts.lengths), 'example')}"
    if counts.over and limit.too_long == "error":
        raise DataError(
            f"{counts.over} of {total} {_are(counts.over)} longer than {limit.whose}; the "
            f"longest, {counts.place}, has {counts.longest} tokens: {_advice(limit)}"
        )
    if prepared.examples:
        return
    reasons = []
    if counts.skipped:
        reasons.append(f"{counts.skipped} {_are(counts.skipped)} longer than {limit.whose}")
    if counts.dropped:
        reasons.append(f"{counts.dropped} {'has' if counts.dropped == 1 else 'have'} nothing to learn")
    left = "none of {} is"
    if len(counts.lengths) > counts.skipped + counts.dropped:
        left = "only one of {} is"
        reasons.append("KTO compares each answer with another one")
    raise DataError(f"{left.format(total)} left to train on: {', and '.join(reasons)}")


def _advice(limit: LengthLimit) -> str:
    names = limit.names
    if names.too_long is None:
        return f"split such examples, or have them cut with {names.max_length}"
    more = "" if limit.is_models else f", or let {names.max_length} be higher"
    return f"{names.too_long} 'skip' leaves such examples out, 'truncate' cuts them{more}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
