"""Markdown of pages: tables and numbers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from coserve.errors import ConfigError


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table. Bars within cells are escaped."""
    return [_line(cells) for cells in (head, ["---"] * len(head), *rows)]


def number(value: float, whole: float = 100.0) -> str:
    """A number without decimals from `whole` on, with three significant digits below."""
    return f"{value:,.0f}" if abs(value) >= whole else f"{value:.3g}"


def write_between(begin: str, end: str, text: Callable[[], str], path: str | Path) -> None:
    """Replaces what stands between two marks of a page. Raises ConfigError where the page does not have
    them."""
    path = Path(path)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ConfigError(f"{path} has no place for it: expected {begin!r} and {end!r}")
    path.write_text(f"{before}{begin}\n\n{text()}\n{end}{after}", encoding="utf-8")


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
