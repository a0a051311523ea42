"""Writes runs of the demo into a page of results: `python -m coserve_benchmarks.demo_page docs/results`.

The page is `demo.md` in that folder. The part between its two marks is replaced by a section for each
`demo*.json` beside it, as `coserve demo --json` writes it; everything else stays.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from coserve.demo.figures import DemoReport
from coserve.demo.picture import svg
from coserve.demo.tables import Sheet, closing
from coserve.errors import ConfigError, CoserveError

BEGIN: Final = "<!-- runs: made of demo*.json by python -m coserve_benchmarks.demo_page -->"
END: Final = "<!-- end of runs -->"
_NONE: Final = "No run is recorded here yet."


def render(page: str, runs: Iterable[tuple[str, DemoReport]]) -> str:
    """The page with sections for these runs, each a file's name and its figures, between its marks. Raises
    ConfigError where the marks are missing."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ConfigError(f"the page of results has no place for runs: expected {BEGIN!r} and {END!r}")
    sections = "\n".join(_section(name, report) for name, report in runs) or f"{_NONE}\n"
    return f"{before}{BEGIN}\n\n{sections}\n{END}{after}"


def read_runs(folder: Path) -> list[tuple[str, DemoReport]]:
    """All `demo*.json` in a folder, by name. Raises ConfigError for one that the demo has not written."""
    return [(file.name, _read(file)) for file in sorted(folder.glob("demo*.json"))]


def _read(file: Path) -> DemoReport:
    try:
        return msgspec.json.decode(file.read_bytes(), type=DemoReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: expected the JSON that `coserve demo` wrote: {error}") from error


def _section(name: str, report: DemoReport) -> str:
    threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
    load = "a trace" if report.trace is not None else "questions"
    data = "" if report.data is None else f", trained on {report.data}"
    stopped = " Stopped before its end." if report.stopped else ""
    header = (
        f"{report.date}: {report.processor}, {threads}, torch {report.torch_version}, {report.model} in "
        f"{report.dtype} on {report.device}; {load}{data}."
    )
    tables = [_table(sheet) for sheet in closing(report)]
    drawn = [f"![Waits and losses]({Path(name).stem}.svg)\n"] if report.ways else []
    return "\n".join([f"### {name}\n", f"{header}{stopped}\n", *tables, *drawn])


def _table(sheet: Sheet) -> str:
    rows = [sheet.columns, ("---",) * len(sheet.columns), *sheet.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"{sheet.title}:\n", *lines, *(f"\n{note}" for note in sheet.notes), ""])


def main(folder: Path) -> None:
    """Rewrites the page in `folder`, and the pictures in it. Raises ConfigError."""
    page = folder / "demo.md"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be read ({error.strerror})") from error
    runs = read_runs(folder)
    page.write_text(render(text, runs), encoding="utf-8")
    for name, report in runs:
        if report.ways:
            (folder / name).with_suffix(".svg").write_text(svg(report), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m coserve_benchmarks.demo_page FOLDER")
    try:
        main(Path(sys.argv[1]))
    except CoserveError as error:
        sys.exit(f"coserve: {error}")
