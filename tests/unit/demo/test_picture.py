"""The picture of all ways, as text and as SVG."""

from xml.etree import ElementTree

from coserve.demo.figures import BINS, DemoReport, Way
from coserve.demo.picture import bars, svg, text


def way_of(name: str, wait: float, loss: float | None) -> Way:
    """A way whose waits grow tenfold in the second half, and whose loss is there from then on."""
    half = BINS // 2
    none: list[float | None] = [None] * half
    waits: list[float | None] = [*[wait] * half, *[10 * wait] * half]
    return Way(
        name, 20.0, 300, 0, 100.0, (0.01, 0.1), (0.01, 0.1), 1.2, 0.95, 9,
        waits, [*none, *[loss] * half],
    )  # fmt: skip


REPORT = DemoReport(
    ways=[way_of("alone", 0.01, None), way_of("coserve", 0.02, 1.5), way_of("two processes", 0.1, 3.0)]
)


def test_bars_are_logarithmic_and_blank_where_nothing_was_measured() -> None:
    assert bars([1.0, None, 10.0, 99.9, 100.0], 1.0, 100.0) == "▁ ▅██"
    assert bars([2.0, 2.0], 2.0, 2.0) == "▅▅"


def test_the_text_fits_80_columns_and_has_one_time_axis() -> None:
    lines = text(REPORT)
    assert all(len(line) <= 80 for line in lines)
    waits, losses = (next(i for i, line in enumerate(lines) if line.startswith(w)) for w in ("Long", "Train"))
    assert "(▁ 10.0 ms, █ 1.00 s, logarithmic)" in lines[waits] and "(▁ 1.5, █ 3," in lines[losses]
    assert len(lines) == losses + 4  # two ways trained
    assert lines[-1].split() == ["0", "s", "20", "s"] and len(lines[-1]) == 15 + BINS
    assert lines[waits + 1] == f"{'alone':<15}" + "▁" * 30 + "▅" * 30


def test_the_svg_has_a_line_for_each_way_that_measured_something() -> None:
    root = ElementTree.fromstring(svg(REPORT))
    lines = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if p.get("fill") == "none"]
    assert len(lines) == 3 + 2
    colors = [line.get("stroke") for line in lines]
    assert colors[1:3] == colors[3:] and len(set(colors)) == 3
    words = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"alone", "coserve", "two processes", "0 s", "20 s"} <= {*words}
    assert str(lines[3].get("d")).count("M") == 1 and str(lines[3].get("d")).count("L") == BINS // 2 - 1


def test_a_demo_that_measured_nothing_has_an_empty_picture() -> None:
    assert text(DemoReport()) == []
    ElementTree.fromstring(svg(DemoReport()))
