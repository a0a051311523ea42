"""Log-probabilities of many tokens as bytes: twenty alternatives of a token take 168 bytes, where objects
take 3,000, and neither end of a socket makes objects of them to pass them on."""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from coserve.core.plan import TokenLogprobs

ABSENT: Final = -1  # the token id of a place without an alternative


class Scores(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities of n tokens one after the other, and of the likeliest k in place of each.

    `chosen` are n numbers, `top` and `ids` n times k, row by row: float32 and (`ids`) int32, little-endian.
    The numbers of an executor are float32, so they come back as they were.
    """

    chosen: bytes = b""
    top: bytes = b""
    ids: bytes = b""

    @classmethod
    def of(cls, rows: Sequence[TokenLogprobs]) -> "Scores":
        """The same numbers packed. Where a row has fewer alternatives than others it is filled up."""
        if not rows:
            return NONE
        width = max(len(row.top) for row in rows)
        top, ids = array("f"), array("i")
        for row in rows:
            ids.extend([token for token, _ in row.top])
            top.extend([logprob for _, logprob in row.top])
            if len(row.top) < width:
                missing = width - len(row.top)
                ids.extend([ABSENT] * missing)
                top.extend([0.0] * missing)
        return cls(little("f", (row.chosen for row in rows)), _bytes(top), _bytes(ids))

    @classmethod
    def joined(cls, parts: Iterable["Scores"]) -> "Scores":
        """All rows of parts that are equally wide, in order."""
        kept = [part for part in parts if part]
        if len(kept) <= 1:
            return kept[0] if kept else NONE
        return cls(*(b"".join(getattr(part, name) for part in kept) for name in ("chosen", "top", "ids")))

    @property
    def width(self) -> int:
        """Alternatives in each row."""
        return len(self.ids) // len(self.chosen) if self.chosen else 0

    def __len__(self) -> int:
        return len(self.chosen) // 4

    def __iter__(self) -> Iterator[TokenLogprobs]:
        width = self.width
        chosen, top, ids = numbers("f", self.chosen), numbers("f", self.top), numbers("i", self.ids)
        for row, own in enumerate(chosen):
            place = slice(row * width, (row + 1) * width)
            pairs = zip(ids[place], top[place], strict=True)
            yield TokenLogprobs(own, tuple(pair for pair in pairs if pair[0] != ABSENT))

    def rows(self, start: int, end: int | None = None) -> "Scores":
        """Rows from `start` to `end`."""
        end = len(self) if end is None else end
        each = 4 * self.width
        return Scores(
            self.chosen[4 * start : 4 * end],
            self.top[each * start : each * end],
            self.ids[each * start : each * end],
        )


NONE: Final = Scores()


def numbers(code: str, data: bytes) -> "array[Any]":
    """Numbers of little-endian bytes; `code` is that of `array`. Raises ValueError for a part of one."""
    found: array[Any] = array(code)
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def little(code: str, values: Iterable[float] | Iterable[int]) -> bytes:
    """Numbers as little-endian bytes; `code` is that of `array`."""
    return _bytes(array(code, values))


def _bytes(made: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        made = made[:]
        made.byteswap()
    return made.tobytes()
