"""`coserve bench draw`, and that what is committed under docs/results is small and can be drawn."""

import json
from pathlib import Path

import pytest

from coserve.core.compact import compact_json, rounded
from coserve.errors import ConfigError
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.results import Results

COMMITTED = Path(__file__).parents[3] / "docs" / "results"
MOST_FIGURES, MOST_PICTURE = 100_000, 60_000  # bytes


@pytest.mark.parametrize("file", sorted(COMMITTED.glob("*.json")), ids=lambda file: file.name)
def test_committed_figures_are_small_and_as_a_run_writes_them(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_FIGURES
    assert text == compact_json(json.loads(text))


def test_committed_pictures_are_small_and_pages_are_not_committed() -> None:
    pictures = [file for file in COMMITTED.iterdir() if file.suffix not in (".json", ".md")]
    assert len(pictures) > 3 and {file.suffix for file in pictures} <= {".svg", ".png"}
    assert all(file.stat().st_size <= MOST_PICTURE for file in pictures)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("policies", "p.html"), ("policies", "p.png"), ("adapters", "a.svg"), ("memory", "m.png"),
        ("trains", "t.svg"), ("engine", "e.svg"), ("plan", "p.svg"),
    ],
)  # fmt: skip
def test_committed_figures_can_be_drawn(name: str, out: str, tmp_path: Path) -> None:
    redraw(COMMITTED / f"{name}.json", tmp_path / out)
    begins = {".html": b"<!doctype html>", ".svg": b"<?xml", ".png": b"\x89PNG"}[Path(out).suffix]
    assert (tmp_path / out).read_bytes().startswith(begins)


@pytest.mark.parametrize(("name", "out"), [("engine", "e.html"), ("tiny", "t.svg")])
def test_what_is_not_drawn_is_told(name: str, out: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\.json holds nothing that a (page|picture) is drawn of"):
        redraw(COMMITTED / f"{name}.json", tmp_path / out)


def test_what_is_no_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match=r"x\.json: expected the JSON that a bench wrote"):
        redraw(tmp_path / "x.json", tmp_path / "x.svg")


def test_a_run_writes_the_committed_form(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    results = Results({"shape": "tiny"}, file)
    results.figure("step", 0.123456, "seconds")
    results.row("coserve.efficiency", 0.987654)
    assert file.read_text(encoding="utf-8") == compact_json(results.as_dict())
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["coserve.efficiency"] == 0.9877 and found["figures"] == rounded(results.as_dict()["figures"])
