"""One picture of all ways: waits of answers and the loss of training on one time axis, as text and SVG."""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final, TypeAlias

from coserve.demo.figures import BINS, DemoReport, Way
from coserve.demo.wording import milliseconds

BARS: Final = "▁▂▃▄▅▆▇█"
_Series: TypeAlias = Sequence[float | None]
_Panel: TypeAlias = tuple[str, Callable[[Way], _Series], Callable[[float], str]]
_PANELS: Final[tuple[_Panel, ...]] = (
    ("Longest wait of any answer for its next token", lambda way: way.waits, milliseconds),
    ("Training loss, nats per token", lambda way: way.losses, lambda loss: f"{loss:.3g}"),
)
_COLORS: Final = ("#4b5563", "#12856a", "#c85a00", "#7a3fc4")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 190, 70, 52, 56  # of a panel, and the space around panels; pixels


def bars(values: _Series, low: float, high: float) -> str:
    """The values as a row of bars on a logarithmic scale; a blank where there is none."""
    return "".join(
        " " if one is None else BARS[min(int(_place(one, low, high) * len(BARS)), len(BARS) - 1)]
        for one in values
    )


def text(report: DemoReport) -> list[str]:
    """The picture in lines of at most 80 characters."""
    lines = []
    for title, ways, low, high, shown, get in _panels(report):
        lines += [f"{title} (▁ {shown(low)}, █ {shown(high)}, logarithmic)"]
        lines += [f"{way.name:<14} {bars(get(way), low, high)}" for way in ways]
    if lines:
        end = f"{report.ways[0].seconds:g} s"
        lines.append(f"{'':<15}{'0 s':<{BINS - len(end)}}{end}")
    return lines


def svg(report: DemoReport) -> str:
    """The picture as SVG."""
    parts = list[str]()
    panels = list(_panels(report))
    for number, (title, ways, low, high, shown, get) in enumerate(panels):
        top = _TOP + number * (_HEIGHT + _GAP)
        parts.append(_label(_LEFT, top - 8, title))
        for value in _ticks(low, high):
            y = top + _HEIGHT * (1 - _place(value, low, high))
            parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#e4e7ec"/>')
            parts.append(_label(_LEFT - 6, y + 4, shown(value), "end"))
        for way in ways:
            color = _color(report, way)
            parts.append(f'<path d="{_line(get(way), low, high, top)}" fill="none" stroke="{color}"/>')
    bottom = _TOP + len(panels) * (_HEIGHT + _GAP)
    if report.ways:
        end = f"{report.ways[0].seconds:g} s"
        parts += [
            _label(_LEFT, bottom - _GAP + 16, "0 s"),
            _label(_LEFT + _WIDTH, bottom - _GAP + 16, end, "end"),
        ]
    for number, way in enumerate(report.ways):
        x = _LEFT + number * _WIDTH / len(report.ways)
        parts.append(f'<path d="M{x:.0f} 16h24" stroke="{_color(report, way)}" stroke-width="3"/>')
        parts.append(_label(x + 30, 20, way.name))
    size = f'width="{_LEFT + _WIDTH + 20}" height="{bottom - 24}"'
    style = 'font-family="sans-serif" font-size="12" fill="#1c2128" stroke-width="1.5"'
    inside = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{inside}\n</svg>\n'


def _panels(
    report: DemoReport,
) -> Iterator[tuple[str, list[Way], float, float, Callable[[float], str], Callable[[Way], _Series]]]:
    """Title, ways, least and greatest value, text of a value, and values of each panel that has any."""
    for title, get, shown in _PANELS:
        ways = [way for way in report.ways if any(value is not None for value in get(way))]
        values = [value for way in ways for value in get(way) if value is not None]
        if values:
            yield title, ways, max(min(values), 1e-6), max(*values, 1e-6), shown, get


def _place(value: float, low: float, high: float) -> float:
    """The value's place on the scale, 0 to 1."""
    return math.log(max(value, low) / low) / math.log(high / low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    """Round values on the scale, with both ends where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**power for power in decades for m in (1, 3) if low <= m * 10.0**power <= high]
    return found if len(found) > 1 else [low, high]


def _line(values: _Series, low: float, high: float, top: float) -> str:
    """A path through the values, broken where one is missing."""
    path, is_down = list[str](), False
    for place, value in enumerate(values):
        if value is not None:
            x = _LEFT + (place + 0.5) * _WIDTH / len(values)
            path.append(
                f"{'L' if is_down else 'M'}{x:.1f} {top + _HEIGHT * (1 - _place(value, low, high)):.1f}"
            )
        is_down = value is not None
    return "".join(path)


def _label(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" stroke="none">{escape(words)}</text>'


def _color(report: DemoReport, way: Way) -> str:
    return _COLORS[report.ways.index(way) % len(_COLORS)]
