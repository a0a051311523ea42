"""Statements of a paper beside figures of simulated runs: there, here, difference and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

CLOSE: Final = 1 / 3  # of a figure of theirs: what is nearer counts as the same size
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Statement:
    """A paper's result beside that of the runs, their agreement, and the reason for a difference."""

    about: str
    there: str
    here: str
    same_direction: bool
    is_close: bool | None  # None where the paper states no size
    why: str = ""

    @property
    def difference(self) -> str:
        """Direction and size in words, and why."""
        size = {None: "", True: ", within a third", False: ", another size"}[self.is_close]
        said = f"same direction{size}" if self.same_direction else "the other direction"
        return f"{said}; {self.why}" if self.why else said


def size(
    about: str,
    there: float,
    here: float,
    why: str = "",
    unit: str = "",
    neutral: float | None = None,
    note: str = "",
) -> Statement:
    """A statement with a figure. `neutral` is the figure of no effect, such as 1 for a ratio: directions are
    the same where both are on one side of it. `note` goes behind the figure here."""
    same = neutral is None or (there - neutral) * (here - neutral) > 0
    is_close = abs(here / there - 1) <= CLOSE if there else abs(here) <= CLOSE
    shown = f"{here:.3g}{unit}{f' ({note})' if note else ''}"
    return Statement(about, f"{there:.3g}{unit}", shown, same, is_close, why)


def claim(about: str, there: str, here: str, holds: bool, why: str = "") -> Statement:
    """A statement without a figure, which `holds` here or does not."""
    return Statement(about, there, here, holds, None, why)


@dataclass(frozen=True, slots=True)
class FigureTable:
    """A table of a setting: a caption, the names of its columns, and cells as texts."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the check: its value, what it is of, and the interval of its mean over seeds, if there are
    several."""

    value: float
    note: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class PaperResult:
    """One paper: its title, the setting and what is assumed of it, tables and statements; values of rows of
    the check with their notes, figures with their units, and series to draw from."""

    title: str
    setting: str
    tables: Sequence[FigureTable]
    statements: Sequence[Statement]
    rows: Mapping[str, Row] = field(default_factory=dict)
    figures: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    series: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        statements = [asdict(one) | {"difference": one.difference} for one in self.statements]
        return {
            "title": self.title,
            "setting": self.setting,
            "tables": [asdict(table) for table in self.tables],
            "statements": statements,
        }
