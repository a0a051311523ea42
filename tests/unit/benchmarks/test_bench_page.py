import json
import re
from base64 import b64decode
from copy import deepcopy
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coserve_benchmarks.drawing import new_figure, style
from coserve_benchmarks.policies import charts, figures, tables
from coserve_benchmarks.policies.ink import inks
from coserve_benchmarks.policies.page import write_page

VOID = {"meta", "br", "link", "img", "input", "hr"}
NASTY = "<b>two</b> & \"one\" $x$ 'y'"


def run(training: float, kept: float, latency: float, **more: Any) -> dict[str, Any]:
    spread = [latency * (0.5 + i / 20) for i in range(20)]
    timing = {"mean": latency, "p50": latency, "p99": 2 * latency}
    return {
        "latency": timing,
        "first_token": timing,
        "between": {key: value / 50 for key, value in timing.items()},
        "attainment": {"10 s": kept, "1 min": 1.0},
        "training": training,
        "training_share": training / 1000,
        "loss": [9.0, 7.5],
        "processor": 0.9,
        "requests": 20,
        "unanswered": 0,
        "latencies": spread,
        "flow": [[float(s), 30.0 + s, training - s, s % 4] for s in range(200)],
        "note": "",
        **more,
    }


RESULTS: dict[str, Any] = {
    "switch.seconds": 0.031,
    "ours.best_lead": 1.1,
    "command": "coserve bench policies --json FILE",
    "shape": "255m",
    "parameters": 254313472,
    "quick": True,
    "date": "2026-11-21T06:37:19+00:00",
    "machine": {
        "cpu": "AMD EPYC",
        "threads": 2,
        "torch_version": "2.13.0",
        "bandwidth": 44e9,
        "matrix_rate": 8e11,
    },
    "bars": {"switch.seconds": "≤ 0.052", "ours.best_lead": "≥ 1.15", "ours.dominated": "≤ 0"},
    "met": {"switch.seconds": True, "ours.best_lead": False},
    "spreads": {"switch.seconds": [0.029, 0.035]},
    "figures": {"peak": {"value": 1000.0, "unit": "tokens/s", "low": 990.0, "high": 1010.0, "floor": None}},
    "notes": {"peak": f"a note: {NASTY}"},
    "series": {},
    "workloads": {
        "report": {
            "title": f"The report's {NASTY}",
            "scale": f"scaled {NASTY}",
            "seconds": 60.0,
            "bounds": {"10 s": "the whole answer within 0.9 s", "1 min": "within 5.4 s"},
            "latency_bounds": {"10 s": 0.9},
            "runs": {
                "adaptive": run(640.0, 1.0, 0.4),
                "temporal:5": run(700.0, 0.2, 3.0),
                "temporal:10": run(500.0, 0.5, 2.0),
                NASTY: run(
                    300.0, 0.9994, 0.8, note=f"best split {NASTY}", loss=None, unanswered=2, requests=22
                ),
            },
        },
        "poisson": {"title": "Poisson", "scale": "", "seconds": 60.0, "bounds": {}, "runs": {"hybrid": {}}},
    },
    "sweeps": {
        "deferral": [
            {"bound": b, "policy": p, "training": 300.0 + b, "attainment": 1.0 - b / 9}
            for b in (1.0, 0.0)
            for p in ("deferred", "continuous")
        ],
        "batch": [{"batch": b, "policy": "temporal:5", "latency": 0.1 * b} for b in (1, 8)],
        "load": [],
    },
    "switch": {"seconds": 0.031, "initialisation": 0.0, "clean_up": 0.0, "data_movement": 0.012, "others": 2},
}


class Reader(HTMLParser):
    """Checks that every element is closed where it was opened, and keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def page_of(results: dict[str, Any], folder: Path) -> tuple[str, Reader]:
    path = folder / "made" / "page.html"
    write_page(results, path)
    page = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return page, reader


def images_of(reader: Reader) -> list[str]:
    """The SVG of every image in the page."""
    return [b64decode(value.split(",")[1]).decode() for name, value in reader.attributes if name == "src"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reader]:
    return page_of(RESULTS, tmp_path_factory.mktemp("page"))


def test_the_page_is_one_file_that_asks_for_nothing(made: tuple[str, Reader]) -> None:
    page, reader = made
    assert not re.search(r"https?://|@import", page)
    assert not {"script", "link", "iframe", "object"} & reader.tags
    assert all(value.startswith("#") for name, value in reader.attributes if name == "href")
    assert all(value.startswith("data:image/svg") for name, value in reader.attributes if name == "src")
    assert not any(name.startswith("on") for name, _ in reader.attributes)


def test_every_reference_leads_to_one_place(made: tuple[str, Reader]) -> None:
    page, reader = made
    assert len(reader.ids) == len(set(reader.ids))
    assert {found for _, found in re.findall(r'(href="|url\()#([^")]*)', page)} <= set(reader.ids)


def test_everybody_and_everything_is_named(made: tuple[str, Reader]) -> None:
    _, reader = made
    shown = reader.text + "".join(map(unescape, images_of(reader)))
    for said in (
        *("adaptive", "temporal:5", "temporal:10", NASTY, "hybrid", "deferred", "continuous"),
        *("AMD EPYC", "2026-11-21", "coserve bench policies --json FILE"),
        "255m (254M parameters), a quick run",
        *("switch.seconds", "≤ 0.052", "met", "ours.best_lead", "missed"),
        *(f"The report's {NASTY}", f"Scaled {NASTY}. Requests arrive for 60 s."),
        "the whole answer within 0.9 s",
        *(f"best split {NASTY}", f"a note: {NASTY}", "1.153 / 0.015", "3.456 / 1.376", "5.918", "others"),
        *("Fine-tuning against the deferral bound", "FineInfer, figure 4", "multi-LoRA report, figure 5.2"),
    ):
        assert said in shown, said
    assert "Fine-tuning against the load" not in shown  # its sweep is empty
    assert "ours.dominated" not in shown  # a key that has a bar and no row


def test_text_is_escaped(made: tuple[str, Reader]) -> None:
    page, reader = made
    assert "<b>two</b>" not in page
    assert "&lt;b&gt;two&lt;/b&gt; &amp; " in page
    assert not any("<b>" in value and name != "aria-label" for name, value in reader.attributes)


def test_charts_are_images_in_the_page(made: tuple[str, Reader]) -> None:
    _, reader = made
    images = images_of(reader)
    assert len(images) == 3  # what came out, over time, sweeps
    assert all("<svg" in image for image in images)


def test_the_page_is_decided_by_the_results(made: tuple[str, Reader], tmp_path: Path) -> None:
    again, _ = page_of(json.loads(json.dumps(RESULTS)), tmp_path)
    assert again == made[0]


@pytest.mark.parametrize("missing", ["workloads", "sweeps", "switch", "bars", "notes", "machine", "figures"])
def test_missing_sections_are_left_out(missing: str, tmp_path: Path) -> None:
    small = deepcopy(RESULTS)
    del small["workloads"]["report"]["runs"]["temporal:10"]
    for key in {"workloads", "sweeps"} - {missing}:
        small[key] = {} if key == "sweeps" else small[key]
    small.pop(missing)
    _, reader = page_of(small, tmp_path)
    assert ("w0" in reader.ids) == (missing != "workloads")
    assert ("switch" in reader.ids) == (missing != "switch")
    assert "sweeps" not in reader.ids


def test_nothing_at_all_is_a_page_too(tmp_path: Path) -> None:
    _, reader = page_of({}, tmp_path)
    assert "Scheduling policies" in reader.text
    assert not {"svg", "table", "section"} & reader.tags


@pytest.mark.parametrize(
    "broken",
    [
        {"latencies": [], "flow": []},
        {"latencies": [1.0], "flow": [[0.0, 1.0, 2.0, 3.0]]},
        {"attainment": {}, "latencies": []},
        {"attainment": None, "loss": None, "latency": None, "training": None},
        {"latencies": [0.0, 0.0], "training": 0.0},
    ],
)
def test_empty_series_do_not_break_it(broken: dict[str, Any], tmp_path: Path) -> None:
    found = {"workloads": {"w": {"title": "W", "runs": {"adaptive": run(1.0, 1.0, 0.1) | broken}}}}
    _, reader = page_of(found, tmp_path)
    assert "adaptive" in reader.text


def test_the_best_of_each_column_is_marked() -> None:
    runs = {"adaptive": run(640.0, 1.0, 0.4), "spatial": run(700.0, 0.9996, 0.4)}
    found = tables.contestants({"runs": runs})
    headings = [column.heading for column in found.columns]
    ours, theirs = (dict(zip(headings, found.rows[name], strict=True)) for name in ("adaptive", "spatial"))
    assert (ours["10 s"].text, ours["10 s"].best) == ("100%", True)
    assert (theirs["10 s"].text, theirs["10 s"].best) == ("99.9%", False)  # not rounded to 100
    assert (theirs["tokens/s"].text, theirs["tokens/s"].best, theirs["tokens/s"].share) == ("700", True, 1.0)
    assert ours["p50"].best and theirs["p50"].best  # a draw
    assert sum(width for _, width in found.groups) == len(headings)


def test_the_best_and_ours_stand_out(made: tuple[str, Reader]) -> None:
    page, _ = made
    assert '<tr class="ours">' in page and "<strong>adaptive</strong>" in page and "<b>700</b>" in page


def test_contestants_keep_their_ink_and_ours_stands_out() -> None:
    found = inks(
        ["temporal:5", "adaptive", "temporal:20", "two processes", "new", "other", "temporal:5"], "adaptive"
    )
    assert list(found) == ["temporal:5", "adaptive", "temporal:20", "two processes", "new", "other"]
    assert len({ink.color for ink in found.values()}) == 6
    assert found["temporal:5"].dash != found["temporal:20"].dash
    assert found["adaptive"].marker == "*"
    assert found["adaptive"].width == max(ink.width for ink in found.values())
    assert found["temporal:5"].marker != found["temporal:20"].marker
    assert inks(["new", "adaptive"], "new")["new"].marker == "*"


def test_the_legend_names_everybody_once() -> None:
    crowd = {f"contestant {i}": run(300.0 + 4 * i, 0.99 + i / 2000, 0.5) for i in range(6)}
    shades = {name: run(1.0, 1.0, 1.0) for name in ("temporal:5", "temporal:10")}
    found = inks([*crowd, *shades], "contestant 0")
    with style():
        figure = new_figure(9.0, 4.5)
        grid = list(figure.subplots(1, 2))
        for axes, runs in zip(grid, (crowd, crowd | shades), strict=True):
            charts.trade(axes, {"runs": runs}, "10 s", found)
        charts.legend_of(figure, grid)
        charts.legend_of(figure, grid, families=found)
    names, families = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert names == [*crowd, "temporal:5", "temporal:10"]
    assert families == [*crowd, "temporal"]


def test_who_leaves_requests_unanswered_does_not_reach_the_top() -> None:
    workload = {"runs": {"a": run(1.0, 1.0, 0.5), "b": run(1.0, 1.0, 0.5, requests=40, unanswered=20)}}
    with style():
        axes = new_figure(4.0, 3.0).subplots()
        charts.latencies(axes, workload, inks(["a", "b"], "a"))
    tops = {line.get_label(): max(line.get_ydata()) for line in axes.lines}
    assert tops == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize("results", [RESULTS, {}], ids=["whole", "empty"])
@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_picture_is_drawn_the_same_again(
    results: dict[str, Any], name: str, begins: bytes, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        figures.draw(results, tmp_path / folder / name)
    first, second = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert first == second
    assert first.startswith(begins)
