"""Bounds of training data, of one file and of one record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from coserve.config import EngineConfig
from coserve.errors import DataError

# Lists of messages, or of pairs of them, in a record.
_CHATS: Final = frozenset({
    "messages", "conversations", "history", "prompt", "completion", "chosen", "rejected",
    "preferred_output", "non_preferred_output",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Most of everything that reading data takes time or memory for."""

    longest: int = 16 * 2**20  # bytes of a line or row, characters of a paragraph or of a row of a table
    unpacked: int = 2**30  # bytes of a compressed file, and of the rows of a columnar one
    ratio: int = 100  # unpacked to packed; text of chats has 3 to 10
    always: int = 16 * 2**20  # unpacked bytes that any file may have, whatever its ratio
    rows: int = 10_000_000  # lines or rows of a file
    few_rows: int = 100_000  # of them any file may have; it may have one more for each of its bytes
    columns: int = 1000
    values: int = 100_000  # texts, numbers, lists and objects of a record
    turns: int = 2048  # messages of a chat (`EngineConfig.max_chat_turns`)
    characters: int | None = None  # of a record's texts (`EngineConfig.max_text_characters`)
    # Of processor time for a file, and for each MiB of it. The slowest files take 5 for a MiB.
    seconds: float = 10.0
    seconds_per_mib: float = 10.0

    def most_rows(self, size: int) -> int:
        """Lines or rows of a file of `size` bytes."""
        return min(self.rows, self.few_rows + size)

    def most_bytes(self, size: int) -> int:
        """Bytes that a compressed file of `size` bytes may unpack to."""
        return min(self.unpacked, max(self.always, self.ratio * size))

    def most_seconds(self, size: int) -> float:
        """Seconds of processor time for reading a file of `size` bytes."""
        return self.seconds + self.seconds_per_mib * size / 2**20


LIMITS: Final = ReadLimits()
_LEAST_CHARACTERS: Final = (
    2**20
)  # texts that are cut to `max_length` tokens may be longer than the model takes
_OF_TOKEN: Final = 128  # characters of the longest token


def limits_of(config: EngineConfig, positions: int = 0) -> ReadLimits:
    """The limits of an engine's settings, for a model of so many positions; 0 where that is not known."""
    most = config.max_text_characters
    if most is None and positions:
        most = max(_LEAST_CHARACTERS, _OF_TOKEN * positions)
    return ReadLimits(turns=config.max_chat_turns, characters=most)


def check_size(record: object, limits: ReadLimits) -> int:
    """The characters of a record's texts. Raises DataError for one with more turns or values than allowed,
    before any of its fields are looked at."""
    if isinstance(record, Mapping):
        check_turns(record, limits.turns)
        if isinstance(inner := record.get("input"), Mapping):
            check_turns(inner, limits.turns)
    values = characters = 0
    waiting: list[object] = [record]
    while waiting:  # not recursive: nesting is checked later
        value = waiting.pop()
        values += 1
        kind = type(value)
        if kind is str:
            characters += len(value)  # type: ignore[arg-type]
        elif kind is dict:
            waiting.extend(value.values())  # type: ignore[attr-defined]
        elif kind is list or isinstance(value, tuple):
            waiting.extend(value)  # type: ignore[arg-type]
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        if values + len(waiting) > limits.values:
            raise DataError(f"expected at most {limits.values} values in a record; found more")
    return characters


def check_characters(characters: int, limits: ReadLimits) -> None:
    """Raises DataError for more characters than a record's texts may have."""
    if (most := limits.characters) is not None and characters > most:
        raise DataError(
            f"expected texts of at most {most} characters in a record; found {characters}: split it, or set "
            "engine.max_text_characters"
        )


def check_turns(record: Mapping[str, Any], most: int) -> None:
    """Raises DataError for a record with more than `most` messages in a field."""
    for key, turns in record.items():
        if isinstance(turns, list | tuple) and len(turns) > most and key in _CHATS:
            raise DataError(
                f'expected at most {most} messages in "{key}"; found {len(turns)}: split the chat, or set '
                "engine.max_chat_turns"
            )
