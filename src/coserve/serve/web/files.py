"""The page's files, as they are sent: compressed once, and cached by browsers for as long as they stay the
same.

The page names its files below a digest of them all (`/web/DIGEST/app.js`), and modules import each other by
relative names: so no browser mixes files of two versions, and none asks twice for what it has.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import coserve

FOLDER: Final = Path(coserve.__file__).parent / "web"
INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_VERSION: Final = b"{{version}}"  # in the page: the digest of all files


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, the same compressed with gzip, its type and its entity tag."""

    plain: bytes
    compressed: bytes
    content_type: str
    tag: str


@dataclass(frozen=True, slots=True)
class PageFiles:
    """All files by their names below the page's folder, and the digest of them all."""

    version: str
    files: Mapping[str, PageFile]


@lru_cache(1)
def page_files() -> PageFiles:
    """The files of this version, read and compressed once: some 20 ms, so not in an event loop."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES and path.is_file())
    texts = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    version = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    made = dict[str, PageFile]()
    for name, text in texts.items():
        plain = text.replace(_VERSION, version.encode()) if name == INDEX else text
        tag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
        made[name] = PageFile(plain, gzip.compress(plain, 9, mtime=0), _TYPES[Path(name).suffix], tag)
    return PageFiles(version, MappingProxyType(made))
