"""One colour, line and mark for each contestant, the same in every chart and table, on light and on dark."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

TEXT: Final = "#1c2128"
MUTED: Final = "#69717c"
RULE: Final = "#c9ced6"
GRID: Final = "#e4e7ec"
BOUND: Final = "#a3202c"
OUTPUT: Final = "#2b6cb0"  # of answers, where there is nobody to tell apart
PAGE: Final = "#fefefe"  # what is behind everything

# What stands for each of the above where the page is dark.
DARK: Final[Mapping[str, str]] = MappingProxyType(
    {
        TEXT: "#e8eaee",
        MUTED: "#9aa3af",
        RULE: "#4a515c",
        GRID: "#2b3038",
        BOUND: "#ff8a8f",
        OUTPUT: "#7db4ea",
        PAGE: "#14171c",
    }
)

# The beginnings of contestants' names. Families share a hue: FineInfer's are blue and green, those that
# take turns orange, what is done without coserve grey.
_KNOWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adaptive": "#d1205f",
        "hybrid": "#7a3fc4",
        "deferred": "#0b62a8",
        "continuous": "#38a3dc",
        "postpone-all": "#12856a",
        "idle-only": "#6fb04a",
        "temporal": "#c85a00",
        "enhanced-temporal": "#8a5430",
        "spatial": "#b8960b",
        "isolated": "#1f9d9a",
        "two": "#4b5563",
        "stop": "#8b93a0",
    }
)
_OTHERS: Final = ("#c14f9b", "#5561d6", "#3d7f3a", "#a8433a", "#4d8b99", "#9a7b1f")
_DASHES: Final = ("solid", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.6, 1.4, 1.6)))
_PALER: Final = (0.0, 0.3, 0.5, 0.15)
_TO_WHITE: Final = 0.36  # of every contestant's colour on dark
_FOREIGN: Final = ("two", "stop")


@dataclass(frozen=True, slots=True)
class Ink:
    """How a contestant is drawn. `color` is for light; `on_dark` stands for it on dark."""

    color: str
    dash: object = "solid"
    marker: str = "o"
    width: float = 1.4
    order: int = 3  # what is drawn above what

    @property
    def on_dark(self) -> str:
        return _paler(self.color, _TO_WHITE)


def inks(names: Iterable[str], ours: str) -> dict[str, Ink]:
    """An ink for each contestant, in order. Those that differ in their options only (`temporal:5`) have
    shades of one colour and different dashes."""
    found: dict[str, Ink] = {}
    relatives: dict[str, int] = {}
    others = 0
    for name in dict.fromkeys(names):
        family = max((known for known in _KNOWN if name.startswith(known)), key=len, default=None)
        if family is None:
            color, family = _OTHERS[others % len(_OTHERS)], name
            others += 1
        else:
            color = _KNOWN[family]
        number = relatives.get(family, 0)
        relatives[family] = number + 1
        dash, pale = _DASHES[number % len(_DASHES)], _PALER[number % len(_PALER)]
        if name == ours:
            found[name] = Ink(_KNOWN["adaptive"], "solid", "*", 2.8, 6)
        elif family in _FOREIGN:
            found[name] = Ink(_paler(color, pale), _DASHES[1 + number % 2], "s", 1.6)
        else:
            found[name] = Ink(_paler(color, pale), dash)
    return found


def _paler(color: str, share: float) -> str:
    """A colour mixed with that share of white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
