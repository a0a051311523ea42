"""The page's files, as they are sent: compressed once, and cached by browsers for as long as they stay the
same.

Scripts and styles are sent without their comments and indentation; the numbers of their lines stay.
Browsers get them in brotli where they take it: over TLS, and from this machine. Others get gzip.

The page names its files below a digest of them all (`/web/DIGEST/app.js`), and modules import each other by
relative names: so no browser mixes files of two versions, and none asks twice for what it has.
"""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import brotli

import coserve

FOLDER: Final = Path(coserve.__file__).parent / "web"
INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_VENDOR: Final = "vendor/"  # other people's files, which are compact already
# What a browser has no use for: indentation, and comments that are lines of their own. Line numbers stay.
_UNUSED: Final = {
    ".js": re.compile(rb"^[ \t]+|^[ \t]*//.*$", re.MULTILINE),
    ".css": re.compile(rb"^[ \t]+|/\*[^\n]*?\*/", re.MULTILINE),
}
_VERSION: Final = b"{{version}}"  # in the page: the digest of all files


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, the same in the encodings that browsers take (the smallest first), its type and
    its entity tag."""

    plain: bytes
    encoded: Mapping[str, bytes]
    content_type: str
    tag: str


@dataclass(frozen=True, slots=True)
class PageFiles:
    """All files by their names below the page's folder, and the digest of them all."""

    version: str
    files: Mapping[str, PageFile]


@lru_cache(1)
def page_files() -> PageFiles:
    """The files of this version, read and compressed once: some 200 ms, so not in an event loop."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES and path.is_file())
    texts = {(name := path.relative_to(FOLDER).as_posix()): _sent(name, path.read_bytes()) for path in paths}
    version = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    made = dict[str, PageFile]()
    for name, text in texts.items():
        plain = text.replace(_VERSION, version.encode()) if name == INDEX else text
        tag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
        encoded = {"br": brotli.compress(plain, quality=11), "gzip": gzip.compress(plain, 9, mtime=0)}
        made[name] = PageFile(plain, encoded, _TYPES[Path(name).suffix], tag)
    return PageFiles(version, MappingProxyType(made))


def _sent(name: str, text: bytes) -> bytes:
    """The part of a file that is sent."""
    unused = None if name.startswith(_VENDOR) else _UNUSED.get(Path(name).suffix)
    return text if unused is None else unused.sub(b"", text)
