"""A figure as SVG that stands in a page: no reference to anywhere, and colours that follow the page's."""

import re
from collections.abc import Mapping
from html import escape
from io import StringIO
from typing import Any, Final

_NOWHERE: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}
# What says who made it, a style that would be the whole page's, and turns by no angle.
_NEEDLESS: Final = re.compile(
    r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*|\stransform=\"rotate\(-0 [^\"]*\"",
    re.DOTALL,
)
_NAMESPACE: Final = re.compile(r'\sxmlns(:\w+)?="[^"]*"')
_NAMED: Final = re.compile(r'(\bid="|href="#|url\(#)')
_COLOR: Final = re.compile(r"((?:fill|stroke): )(#[0-9a-f]{6})")
_SIZE: Final = re.compile(r'\s(width|height)="[^"]*"')
_PATH: Final = re.compile(r'\sd="[^"]*"')
_DIGITS: Final = re.compile(r"(\.\d\d)\d+")  # hundredths of a point are enough
_FONT: Final = re.compile(r"'DejaVu Sans'[^;\"]*")


def inline(figure: Any, key: str, said: str, colors: Mapping[str, str]) -> str:
    """The figure as an `<svg>` element. `key` sets its ids apart from other figures', `said` is read to
    those who cannot see it, and `colors` gives what CSS calls each colour."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata=_NOWHERE, transparent=True)
    text = buffer.getvalue()
    text = _NEEDLESS.sub("", text[text.index("<svg") :])
    start, rest = text.split(">", 1)
    start = _SIZE.sub("", _NAMESPACE.sub("", start))
    # HTML knows the namespaces by itself.
    rest = _NAMESPACE.sub("", rest.replace("xlink:href", "href"))
    rest = _FONT.sub("inherit", _NAMED.sub(rf"\g<1>{key}-", rest))
    rest = _COLOR.sub(lambda found: found[1] + colors.get(found[2], found[2]), rest)
    rest = _PATH.sub(_shorter, rest)
    return f'{start} role="img" aria-label="{escape(said)}">{rest.strip()}'


def _shorter(path: re.Match[str]) -> str:
    return " " + " ".join(_DIGITS.sub(r"\1", path[0]).split())
