"""Hooks of mkdocs. The README is the first page, pages of reference are made from the code, and links out of
`docs` lead to the pages that stand for what is there."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

from coserve_benchmarks.site.reference import pages

ROOT: Final = Path(__file__).parents[3]
# Files of the repository's root that are pages of the site, and their addresses there.
TAKEN: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK: Final = re.compile(r"\[([^\[\]]*)\]\(((?!https?:|#)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not files of `docs`."""
    for name, place in TAKEN.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for place, make in pages(Path(config.docs_dir)).items():
        files.append(File.generated(config, place, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links as the site has its pages."""
    place = page.file.src_uri
    taken = {here: name for name, here in TAKEN.items()}
    source = ROOT / taken[place] if place in taken else Path(config.docs_dir) / place

    def mended(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else link[2]
        if name in TAKEN:
            name = f"docs/{TAKEN[name]}"
        if not name.startswith("docs/"):  # a file of the sources, which the site does not have
            return link[1] if target.exists() else link[0]
        depth = "../" * place.count("/")
        return f"[{link[1]}]({depth}{name.removeprefix('docs/')}{link[3] or ''})"

    return _LINK.sub(mended, markdown)
