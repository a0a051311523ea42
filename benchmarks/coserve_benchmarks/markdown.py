"""Markdown of pages: tables and numbers."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table. Bars within cells are escaped."""
    return [_line(cells) for cells in (head, ["---"] * len(head), *rows)]


def number(value: float, whole: float = 100.0) -> str:
    """A number without decimals from `whole` on, with three significant digits below."""
    return f"{value:,.0f}" if abs(value) >= whole else f"{value:.3g}"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
