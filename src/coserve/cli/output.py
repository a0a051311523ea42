"""Output of commands: tables for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

PIPED_WIDTH = 160


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Prints a plain table, or the sentence `nothing` where there are no rows."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH  # a pipe has none of its own, and 80 columns fold ids
    if not rows:
        console.print(Text(nothing))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # cells are text, not markup
    console.print(table)


def print_fields(values: Mapping[str, Any]) -> None:
    """Prints names and values, one pair a line, without unset ones."""
    shown = {key: value for key, value in values.items() if value not in (None, {}, [])}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        print(f"{key:<{width}}  {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")


def moment(seconds: Any) -> str:
    """A Unix time in local time; empty for None."""
    if not isinstance(seconds, int | float):
        return ""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """A duration in words: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
