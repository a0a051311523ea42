"""The weight of the page as a browser loads it: what each view imports, compressed."""

import re
from pathlib import PurePosixPath

import pytest

from coserve.serve.web.files import FOLDER, page_files

MOST_WEIGHT = 60 * 1024  # bytes
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
    assert sum(len(page_files().files[name].compressed) for name in names) <= MOST_WEIGHT
