"""Figures of one part of a run, in a file that is whole at any time: a part that hangs keeps its own."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuFigure:
    """A value with its unit. `bound` is the least or the most that the hardware allows, in the same unit;
    `share` is how much of the bound was reached, 1 at most."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    share: float | None = None
    note: str = ""


class PartLog:
    """Collects a part's figures, notes and failures, and knows how many of its seconds are left."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._end = file, time.monotonic() + seconds
        self._figures: list[GpuFigure] = []
        self._notes: list[str] = []
        self._failures: list[str] = []
        self._tables: dict[str, list[Sequence[Any]]] = {}

    @property
    def left(self) -> float:
        """Seconds until the part is ended from outside."""
        return self._end - time.monotonic()

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        bound: float | None = None,
        share: float | None = None,
        note: str = "",
    ) -> None:
        """Adds a figure."""
        self._figures.append(GpuFigure(name, value, unit, bound, share, note))
        self._write()

    def seconds(self, name: str, seconds: float, floor: float, note: str = "") -> None:
        """Adds a time beside the least that the hardware allows, both given in seconds, as milliseconds."""
        self.figure(name, 1e3 * seconds, "ms", 1e3 * floor, floor / seconds, note)

    def note(self, text: str) -> None:
        """Adds a remark, or what was left out."""
        self._notes.append(text)
        self._write()

    def failure(self, text: str) -> None:
        """Adds something that is wrong: the part has failed, and goes on."""
        self._failures.append(text)
        self._write()

    def table(self, name: str, rows: list[Sequence[Any]]) -> None:
        """Adds a table; its first row has the titles of the columns."""
        self._tables[name] = rows
        self._write()

    def _write(self) -> None:
        found = {
            "figures": [asdict(figure) for figure in self._figures],
            "notes": self._notes,
            "failures": self._failures,
            "tables": self._tables,
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(found))
        os.replace(new, self._file)
