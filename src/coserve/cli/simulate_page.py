"""A sweep as one HTML page: its picture, its table, and where the hardware's numbers are from."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from coserve.cli.simulate_picture import draw


def write_page(
    found: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]], path: Path
) -> None:
    """Writes the page of a sweep's results. What a user has named is text there, never markup."""
    picture = BytesIO()
    draw(found["cells"], found["model"]["name"], picture)
    svg = picture.getvalue().decode()
    source = (files("coserve.cli") / "simulate_page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    svg = svg[svg.index("<svg") :]  # matplotlib escapes the texts in it
    path.write_text(
        template.render(found=found, columns=columns, rows=rows, picture=Markup(svg)), encoding="utf-8"
    )
