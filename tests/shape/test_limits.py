"""The page of limits against the code: each bound has a row, and each row the code's value."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import coserve
from coserve.serve.settings import ServerSettings

PAGE = Path(__file__).parents[2] / "docs/limits.md"
CODE = Path(coserve.__file__).parent
ROOMS = "serve", "jobs", "adapters", "split", "engine", "train/grading"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BOUND = re.compile(r"_?(MOST|LONGEST|LARGEST|DEEPEST|MAX)(_[A-Z_]+)?")
SETTING = re.compile(r"max_\w+|\w+_(seconds|days|steps)")
# Constants with such names that bound nothing of a request: of caches, errors' words and the processes' own.
OWN = {
    "adapters.methods.fourierft._MOST_KNOWN", "adapters.linears._MOST_PEAKS",
    "serve.processes.process.LONGEST_LINE",
    "serve.processes.process.LARGEST_LOG", "serve.processes.watchdog._MOST_DOUBLINGS",
    "serve.adapter_registry.imports._LONGEST_BASE", "serve.errors._LONGEST",
    "serve.reporting.mlflow._LONGEST",
    "serve.settings.LONGEST_SOCKET_PATH", "serve.adapter_registry.catalog._MOST_REMOVED",
    "serve.adapter_registry.catalog._MOST_NAMED",
    "jobs.messages._MOST_QUOTED", "jobs.placed._MOST_ERRORS", "split.address._LONGEST",
    "jobs.columns._MOST_SAID", "split.spans.MOST_SPANS", "split.clients._MOST_SEEN",
    "split.batching.MOST_AT_ONCE", "split.batching.MOST_JOINED", "split.connection._MOST_SENT",
    "split.connection._MOST_BYTES", "split.queues.MOST_PRODUCTS", "split.privacy.field._MOST_TERMS",
}  # fmt: skip


class Row(NamedTuple):
    """A line of a table."""

    what: str
    value: float
    outcome: str
    source: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| What"):
            continue
        what, value, outcome, source = (cell.strip() for cell in line.strip("| ").split(" | "))
        number, _, unit = value.partition(" ")
        found.append(Row(what, float(number) * UNITS.get(unit, 1), outcome, source.strip("`")))
    return found


def value_of(source: str) -> Any:
    """The default of a setting, or the value of a constant or of a dataclass's field."""
    if "." not in source:
        return next(one.default for one in dataclasses.fields(ServerSettings) if one.name == source)
    module, _, name = source.rpartition(".")
    if module.rpartition(".")[2][0].isupper():
        module, _, kind = module.rpartition(".")
        holder = getattr(importlib.import_module(f"coserve.{module}"), kind)
        return next(one.default for one in dataclasses.fields(holder) if one.name == name)
    return getattr(importlib.import_module(f"coserve.{module}"), name)


def constants() -> set[str]:
    """All constants of the rooms that are named as bounds."""
    found = set()
    for room in ROOMS:
        for file in (CODE / room).rglob("*.py"):
            module = ".".join(file.relative_to(CODE).with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names = [one.id for one in targets if isinstance(one, ast.Name)]
                found |= {f"{module}.{name}" for name in names if BOUND.fullmatch(name)}
    return found


def test_each_row_has_the_value_of_the_code() -> None:
    table = rows()
    assert len(table) > 80 and len({row.source for row in table}) == len(table)
    for row in table:
        assert value_of(row.source) == row.value, row
        assert row.what and row.outcome, row


def test_each_bound_of_the_code_has_a_row() -> None:
    """A bound without one needs a line in docs/limits.md, or in `OWN` if no request reaches it."""
    named = {row.source for row in rows()}
    settings = {one.name for one in dataclasses.fields(ServerSettings) if SETTING.fullmatch(one.name)}
    assert settings <= named, sorted(settings - named)
    found = constants()
    assert found <= named | OWN, sorted(found - named - OWN)
    assert found >= OWN, sorted(OWN - found)
    assert not OWN & named
