"""Style of all pictures, and writing them. Needs matplotlib."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

TEXT: Final = "#1c2128"
MUTED: Final = "#69717c"
RULE: Final = "#c9ced6"
GRID: Final = "#e4e7ec"
BOUND: Final = "#a3202c"
OUTPUT: Final = "#2b6cb0"  # of answers, where there is nobody to tell apart
_DECIMALS: Final = re.compile(r"(\.\d)\d+")  # tenths of a point are enough for the eye
_PATH: Final = re.compile(r'\b(?:d|x|y|transform)="[^"]*\d[^"]*"')
_COLORS: Final = 256  # of a PNG: a palette is a fourth of the bytes
_DPI: Final = 80
_STYLE: Final = {
    "svg.fonttype": "none",  # letters, not their outlines: a tenth of the bytes
    "svg.hashsalt": "coserve",  # the same picture for the same data
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": TEXT,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": TEXT,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 2.4,
}


@contextmanager
def style() -> Iterator[None]:
    """Applies the common style; figures are made and saved within."""
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that arranges what is put on it."""
    return Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Any) -> str:
    """The figure as SVG, the same for the same data, with coordinates to a tenth of a point."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return _PATH.sub(lambda found: _DECIMALS.sub(r"\1", found[0]), buffer.getvalue())


def save(figure: Any, path: str | Path) -> None:
    """Writes the figure as SVG, or as what else `path`'s ending says; folders that are missing are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg_of(figure), encoding="utf-8")
    else:
        buffer = BytesIO()
        figure.savefig(buffer, format="png", facecolor="white", dpi=_DPI)
        image = Image.open(buffer).convert("RGB")
        palette = image.quantize(_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(path, optimize=True)
