"""The site of the documentation: every page is in its navigation, diagrams are as the code draws them, and
pages of reference have all that the code has."""

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coserve.config import EngineConfig
from coserve.metrics import Metrics
from coserve.serve.settings import ServerSettings
from coserve_benchmarks.site import reference
from coserve_benchmarks.site.diagrams import DIAGRAMS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    made = {"index.md", "changelog.md", "contributing.md", *reference.pages(DOCS)}
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert len(set(listed)) == len(listed)
    assert set(listed) == there | made


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_diagrams_in_docs_are_those_that_the_code_draws(name: str) -> None:
    drawn = DIAGRAMS[name]().svg()
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == drawn, "draw them again: see site/diagrams.py"
    width, height = map(float, ElementTree.fromstring(drawn).attrib["viewBox"].split()[2:])
    for x, y, wide, high in re.findall(
        r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn
    ):
        assert float(x) + float(wide) <= width and float(y) + float(high) <= height
    classes = set(re.findall(r'class="(\w+)', drawn)) - {"small", "bold"}
    light, dark = drawn.partition("</style>")[0].split("@media (prefers-color-scheme:dark)")
    assert all(f".{name}{{" in light and f".{name}{{" in dark for name in classes)
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == {*DIAGRAMS}


def test_the_reference_has_every_setting_flag_metric_and_endpoint() -> None:
    commands, settings = reference.commands(), reference.settings(DOCS / "coserve.toml")
    for kind in (ServerSettings, EngineConfig):
        assert all(f"\n| `{field.name}` |" in settings for field in dataclasses.fields(kind))
    serve = commands.split("## coserve serve\n")[1].split("\n## ")[0]
    flags = set(re.findall(r"`(--[\w-]+)(?:/--[\w-]+)?` \|", settings))
    assert len(flags) > 30 and flags <= set(re.findall(r"`(--[\w-]+)`", serve))
    assert {"coserve jobs pause", "coserve adapters merge", "coserve keys create"} <= set(
        re.findall(r"^## (.*)$", commands, re.MULTILINE)
    )
    exported = {
        one.split()[2] for one in Metrics().render().decode().splitlines() if one.startswith("# TYPE")
    }
    assert {one for one in exported if not one.endswith("_created")} == set(
        re.findall(r"^\| `(\w+)`", reference.metrics(), re.MULTILINE)
    )
    endpoints = reference.endpoints()
    for path in ("POST /v1/chat/completions", "POST /v1/messages", "POST /api/v1/optim_step", "GET /metrics"):
        assert f"| `{path}` |" in endpoints
    assert endpoints.count("\n| `") == sum(len(route.methods) for route in reference.served())


def test_each_release_has_at_most_sixty_lines_of_changes() -> None:
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert [one.split()[0] for one in releases[:2]] == ["Unreleased", "0.2.0"]
    assert all(len(one.splitlines()) <= 60 for one in releases[1:])


class _Addresses(HTMLParser):
    """Addresses of what a page of the site loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
        if tag in loads and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.add(given.get(loads[tag]) or "")


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        read = _Addresses()
        read.feed(page.read_text())
        assert not [one for one in read.found if one.startswith(("http:", "https:", "//"))], page
    python = (tmp_path / "site" / "reference" / "python.html").read_text()
    assert all(name in python for name in ("Engine", "finetune", "SamplingParams", "CoserveError"))
