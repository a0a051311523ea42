"""A curve drawn with the eight dots of braille characters."""

from collections.abc import Sequence
from itertools import pairwise

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a character


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws a curve as `height` lines of `width` characters, from left to right, with the largest value at
    the top.

    More values than there are columns of dots are averaged; fewer leave the right side empty.
    """
    columns = resample(values, 2 * width)
    if not columns:
        return [chr(BLANK) * width] * height
    low, high = min(columns), max(columns)
    rows = 4 * height - 1
    places = [round((high - value) / (high - low) * rows) if high > low else rows // 2 for value in columns]
    cells = [[0] * width for _ in range(height)]
    before = places[0]
    for x, y in enumerate(places):
        # The line to the one before is part of the picture: steep curves would fall apart into dots.
        for dot in range(min(before, y), max(before, y) + 1):
            if dot != before or dot == y:
                cells[dot // 4][x // 2] |= DOTS[dot % 4][x % 2]
        before = y
    return ["".join(chr(BLANK + cell) for cell in row) for row in cells]


def resample(values: Sequence[float], most: int) -> list[float]:
    """Averages neighbours until at most `most` values are left."""
    count = min(most, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
