"""Tables of the papers' settings, "there / here / difference and why", for the page of a check."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

SECTION: Final = "papers"  # of the JSON
_COLUMNS: Final = ("statement", "there", "here", "difference and why")


def paper_tables(papers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of all papers' tables."""
    for paper in papers.values():
        yield f"## {paper['title']}"
        yield ""
        yield paper["setting"]
        for table in paper["tables"]:
            yield ""
            yield f"{table['caption']}:"
            yield ""
            yield from _table(table["columns"], table["rows"])
        yield ""
        rows = [[one["about"], one["there"], one["here"], one["difference"]] for one in paper["statements"]]
        yield from _table(_COLUMNS, rows)
        yield ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(row)} |"
