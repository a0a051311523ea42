"""The page of results, made from what runs wrote."""

from pathlib import Path

import pytest

from coserve.core.compact import compact_json
from coserve.demo.figures import AdapterFigures, DemoReport, way
from coserve.demo.picture import svg
from coserve.errors import ConfigError
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve_benchmarks.demo_page import BEGIN, END, main, read_runs, render

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def report() -> DemoReport:
    load = LoadResult(0.0, 2.0, [AnswerTimes(0.0, [0.125, 0.25, 0.28125])])
    ways = [way("alone", load, [], None, 1.5, 2), way("coserve", load, [], load, 1.5, 2)]
    adapters = [AdapterFigures("pirate", "a | b", 9, 4.0, 0.5, 50, 3.0, 0.25, 0.0, 0.9)]
    return DemoReport(
        date="2026-11-24", processor="A CPU", threads=2, torch_version="2.13", model="coserve-tiny",
        dtype="bfloat16", device="cpu", capacity=2.0, share=0.5, requests=1, slowdown=1.5, ways=ways,
        adapters=adapters,
    )  # fmt: skip


def test_the_committed_page_is_made_of_the_committed_runs() -> None:
    page = (RESULTS / "demo.md").read_text(encoding="utf-8")
    assert page == render(page, read_runs(RESULTS))


def test_a_run_becomes_tables_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "demo.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\n## Older\n")
    (tmp_path / "demo-cpu.json").write_text(compact_json(report().as_dict()))
    main(tmp_path)
    text = page.read_text()
    main(tmp_path)
    assert page.read_text() == text  # a second time changes nothing
    assert text.startswith(f"# Title\n\n{BEGIN}\n\n### demo-cpu.json\n\n2026-11-24: A CPU, 2 threads, ")
    assert text.endswith(f"\n{END}\n\n## Older\n") and "old\n" not in text
    lines = text.splitlines()
    assert "|  | alone | coserve |" in lines
    assert "| first token, p50 | 125.0 ms | 125.0 ms |" in lines
    assert "| within 1.5 times | - | 100.0% |" in lines
    assert any(line.startswith("| pirate: a \\| b | 9 |") for line in lines)
    assert any(line.startswith("Fewer than 200 answers in a column (1)") for line in lines)
    assert "![Waits and losses](demo-cpu.svg)" in lines
    assert (tmp_path / "demo-cpu.svg").read_text() == svg(report())


def test_a_page_without_runs_says_so() -> None:
    assert "No run is recorded" in render(f"{BEGIN}{END}", [])


def test_a_page_without_its_marks_is_told() -> None:
    with pytest.raises(ConfigError, match="no place for runs"):
        render(f"{END} {BEGIN}", [])


@pytest.mark.parametrize("text", ["{", '{"ways": 3}', "[]"])
def test_what_the_demo_has_not_written_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "demo.json").write_text(text)
    with pytest.raises(ConfigError, match=r"demo\.json: expected the JSON that `coserve demo` wrote"):
        read_runs(tmp_path)
