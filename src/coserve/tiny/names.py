"""Invented names, and their split into training and held-out ones.

Names are built from syllables, so a held-out name has known pieces in an unseen order: the model can only
copy it from the question.
"""

# ruff: noqa: SIM905 - long lists of words read better as text

from collections.abc import Callable
from random import Random
from typing import Final, Literal
from zlib import crc32

Split = Literal["train", "held_out"]

HELD_OUT_SHARE: Final = 5  # one unit in five is held out

_HEADS: Final = (
    "Ba Be Bri Da De Do El Fa Fen Ga Gri Ha Hol Is Jo Ka Kel La Lo Lu Ma Mi Na Ne Or Pe Pi Ra Ro Sa "
    "Se So Ta Ti To Ul Va Ve Wi Za"
).split()
_TAILS: Final = (
    "bel bin da dan den dor fi gan ka kin la len li lo mar mi na nel no ra rel ri ro sa sen so ta tis va vin"
).split()
_PLACE_HEADS: Final = (
    "Al Bar Bel Bor Cal Car Dal Dun Ed Fal Far Gal Gor Har Hel Kar Kin Lam Lin Mar Mel Mor Nor Oak "
    "Pen Pol Ril Sal Sel Sun Tal Tol Tor Val Ven Vor Wel Win Yar Zel"
).split()
_PLACE_TAILS: Final = (
    "bay beck bridge bury by cot dale den fell ford gate ham holm hurst ley low mere min mont more "
    "mouth nes port ridge rith stead stow ton wick wold"
).split()
_WORD_PARTS: Final = (
    "ba be bo da di du fa fe fo ga gu ka ki ko la le lu ma me mo na ni nu pa pe po ra re ri sa se su "
    "ta ti to va ve vo za zu"
).split()


def held_out(unit: str) -> bool:
    """Tells whether a unit (a name, an operand pair, a list) belongs to the held-out side: a fixed hash
    decides."""
    return crc32(unit.encode()) % HELD_OUT_SHARE == 0


def draw(rng: Random, split: Split, *parts: list[str]) -> str:
    """Join one random piece of every part, drawing again until the result is on the wanted side."""
    while True:
        name = "".join(rng.choice(part) for part in parts)
        if held_out(name) == (split == "held_out"):
            return name


def person(rng: Random, split: Split) -> str:
    """A person's name of two or three syllables, such as "Mira"."""
    if rng.random() < 0.7:
        return draw(rng, split, _HEADS, _TAILS)
    return draw(rng, split, _HEADS, _TAILS, _TAILS)


def place(rng: Random, split: Split) -> str:
    """A place name, such as "Tolmere"."""
    return draw(rng, split, _PLACE_HEADS, _PLACE_TAILS)


def word(rng: Random, split: Split) -> str:
    """A made-up lower-case word, such as "zulema", for the copying questions."""
    return draw(rng, split, *[_WORD_PARTS] * rng.choice((2, 2, 3)))


def people(rng: Random, split: Split, count: int) -> list[str]:
    """Names of `count` different people."""
    return _different(lambda: person(rng, split), count)


def places(rng: Random, split: Split, count: int) -> list[str]:
    """Names of `count` different places."""
    return _different(lambda: place(rng, split), count)


def _different(draw: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)
