"""One colour, line and mark for each contestant, the same in every chart and table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# The beginnings of contestants' names. Families share a hue: FineInfer's are blue and green, those that
# take turns orange, what is done without coserve grey.
_KNOWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adaptive": "#d1205f",
        "hybrid": "#7a3fc4",
        "deferred": "#0b62a8",
        "heterogeneous": "#2b7a8c",
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
_MARKERS: Final = ("o", "D", "^", "v")
_PALER: Final = (0.0, 0.3, 0.5, 0.15)
_FOREIGN: Final = ("two", "stop")


@dataclass(frozen=True, slots=True)
class Ink:
    """Drawing style of a contestant."""

    color: str
    dash: object = "solid"
    marker: str = "o"
    width: float = 1.4
    order: int = 3  # what is drawn above what
    family: str = ""  # the policy without its options


def inks(names: Iterable[str], ours: str) -> dict[str, Ink]:
    """An ink for each contestant, in order. Those that differ in their options only (`temporal:5`) have
    shades of one colour, different dashes and marks."""
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
            found[name] = Ink(_KNOWN["adaptive"], "solid", "*", 2.8, 6, name)
        elif family in _FOREIGN:
            found[name] = Ink(_paler(color, pale), _DASHES[1 + number % 2], "s", 1.6, family=name)
        else:
            marker = _MARKERS[number % len(_MARKERS)]
            found[name] = Ink(_paler(color, pale), dash, marker, family=family)
    return found


def _paler(color: str, share: float) -> str:
    """A colour mixed with that share of white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
