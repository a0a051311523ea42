"""Names beside points, where they cover neither each other nor a point."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any, Final

_SIZE: Final = 8.0  # points; of the letters
_LETTER: Final = 0.6  # widths of an average letter, in sizes
_POINT: Final = 4.5  # points from a mark's middle that stay free
_REACH: Final = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0)  # points from a mark to its name
_CLEARER: Final = 2.0  # points that a name is nearer to its own mark than to any other
_DOUBT: Final = 8.0  # square points of covering that a name in doubt is as bad as
_LEADER: Final = 10.0  # from this distance on a line leads there


@dataclass(frozen=True, slots=True)
class Label:
    """A name for the point (x, y) of the data."""

    x: float
    y: float
    text: str
    color: str
    bold: bool = False


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    bottom: float
    right: float
    top: float

    def covers(self, other: "_Box") -> float:
        """The area that both have, in square points."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def distance(self, x: float, y: float) -> float:
        """From the nearest edge to a point."""
        return hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def label_points(axes: Any, labels: Sequence[Label]) -> None:
    """Writes each name as near to its point as it can. The layout must be final: draw the figure before."""
    scale = 72.0 / axes.figure.dpi
    frame = axes.get_window_extent()
    inside = _Box(*(edge * scale for edge in (frame.x0, frame.y0, frame.x1, frame.y1)))
    places = [axes.transData.transform((label.x, label.y)) * scale for label in labels]
    taken = [_Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in places]
    for number, (label, (x, y)) in enumerate(zip(labels, places, strict=True)):
        strangers = [place for i, place in enumerate(places) if i != number]
        costs = (
            (_cost(box, taken, inside) + _mistaken(box, (x, y), strangers), box)
            for box in _around(x, y, label.text)
        )
        _, box = min(costs, key=lambda found: found[0])
        taken.append(box)
        _write(axes, label, x, y, box)


def _around(x: float, y: float, text: str) -> Iterator[_Box]:
    """Where a name may stand, the best place first."""
    wide, high = len(text) * _SIZE * _LETTER, _SIZE * 1.25
    for reach in _REACH:
        for side, rise in ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1)):
            left = x - wide / 2 + side * (wide / 2 + reach * (0.7 if rise else 1.0))
            bottom = y - high / 2 + rise * reach
            yield _Box(left, bottom, left + wide, bottom + high)


def _cost(box: _Box, taken: Sequence[_Box], inside: _Box) -> float:
    """What a place covers, and how much of it lies outside the axes; 0 is free."""
    return sum(box.covers(other) for other in taken) + 4 * max(0.0, box.area - box.covers(inside))


def _mistaken(box: _Box, own: tuple[float, float], strangers: Sequence[tuple[float, float]]) -> float:
    """What it costs that a name seems to be another point's."""
    away = box.distance(*own) + _CLEARER
    return _DOUBT * sum(box.distance(*other) < away for other in strangers)


def _write(axes: Any, label: Label, x: float, y: float, box: _Box) -> None:
    middle = (box.left + box.right) / 2 - x
    near = 0.0 if box.left <= x <= box.right else min(abs(box.left - x), abs(box.right - x))
    far = max(near, abs((box.bottom + box.top) / 2 - y)) >= _LEADER
    leader = {"arrowstyle": "-", "color": label.color, "lw": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3}
    note = axes.annotate(
        label.text,
        (label.x, label.y),
        xytext=(middle, (box.bottom + box.top) / 2 - y),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=_SIZE,
        color=label.color,
        fontweight="bold" if label.bold else "normal",
        arrowprops=leader if far else None,
        zorder=7,
    )
    note.set_in_layout(False)
