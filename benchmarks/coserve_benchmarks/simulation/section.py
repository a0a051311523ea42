"""Tables of the papers' settings, "there / here / difference and why", for the page of a check."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from coserve_benchmarks.markdown import table

SECTION: Final = "papers"  # of the JSON
_COLUMNS: Final = ("statement", "there", "here", "difference and why")


def paper_tables(papers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of all papers' tables."""
    for paper in papers.values():
        yield f"## {paper['title']}"
        yield ""
        yield paper["setting"]
        for shown in paper["tables"]:
            yield ""
            yield f"{shown['caption']}:"
            yield ""
            yield from table(shown["columns"], shown["rows"])
        yield ""
        rows = [[one["about"], one["there"], one["here"], one["difference"]] for one in paper["statements"]]
        yield from table(_COLUMNS, rows)
        yield ""
