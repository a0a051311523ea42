"""The weight of the page as a browser loads it, compressed: all of it, and what each view imports."""

import re
from pathlib import PurePosixPath

import pytest

from coserve.serve.web.files import FOLDER, page_files

MOST_WEIGHT = 60_000  # bytes
VIEWS = re.findall(r'import\("\./([\w-]+\.js)"\)', (FOLDER / "views/index.js").read_text())


def loaded_by(*names: str) -> set[str]:
    """Files with all that they import at once, and what charts fetch."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        text = page_files().files[name].plain.decode()
        if name.endswith(".js") and not name.startswith("vendor/"):
            here = (FOLDER / name).parent
            for path in re.findall(r'(?:from|new URL\()\s*"(\.[^"]+)"', text):
                left.append(PurePosixPath((here / path).resolve().relative_to(FOLDER)).as_posix())
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_light(view: str) -> None:
    shell = re.findall(r'(?:href|src)="/web/[^/"]+/([^"]+)"', page_files().files["index.html"].plain.decode())
    names = loaded_by("index.html", *shell, f"views/{view}")
    assert {"app.js", "api.js", "ui.js", "vendor/uplot.js", f"views/{view}"} <= names
    for encoding in ("br", "gzip"):
        assert sum(len(page_files().files[name].encoded[encoding]) for name in names) <= MOST_WEIGHT


def test_all_views_together_are_light() -> None:
    """In brotli, which browsers take over TLS and from their own machine."""
    assert sum(len(file.encoded["br"]) for file in page_files().files.values()) <= MOST_WEIGHT


def test_what_is_sent_is_what_is_there_but_for_comments_and_indentation() -> None:
    for name, file in page_files().files.items():
        lines, sent = ((FOLDER / name).read_text().splitlines(), file.plain.decode().splitlines())
        if name.endswith(".js") and not name.startswith("vendor/"):
            assert len(sent) == len(lines)
            assert all(
                short == whole.strip() or (whole.strip().startswith("//") and not short)
                for whole, short in zip(lines, sent, strict=True)
            )
        assert name != "style.css" or (b"/*" not in file.plain and len(sent) == len(lines))
