"""Cells of a simulated contest: figures by hand, every traffic and policy once, and their tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.policies import POLICIES
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.trace_formats import TraceRow
from coserve_benchmarks.policies import sheet
from coserve_benchmarks.policies.cells import ALONE, FIGURES, CellRunner, SimulatedTestbed, cell, traffics
from coserve_benchmarks.policies.contest import own_bounds
from coserve_benchmarks.policies.fitted import RoundSettings
from coserve_benchmarks.policies.simulate import run_simulated

TRACE = tuple(TraceRow(0.5 * n, 10 + 7 * n % 90, 1 + n % 20) for n in range(720))


def runner(load: float = 0.5, requests: int = 8, **more: Any) -> CellRunner:
    return CellRunner(SimulatedTestbed(), RoundSettings(1.0, 1000, TRACE), load, requests, **more)


def test_figures_of_a_cell() -> None:
    bounds = SLO(first_token=1.0)
    load = LoadResult(
        started=10.0,
        seconds=4.0,
        answers=[
            AnswerTimes(10.0, [10.5, 11.5, 12.0], bounds),
            AnswerTimes(11.0, [13.0], bounds),
            AnswerTimes(12.0, [], bounds),  # unanswered
            AnswerTimes(13.0, [13.5], bounds),
        ],
        trained=[(12.0, 40.0), (14.0, 80.0)],
    )
    alone = LoadResult(0.0, 4.0, [AnswerTimes(at, [at + 0.5]) for at in (0.0, 1.0, 2.0, 3.0)])
    found = dict(zip(FIGURES, cell(load, alone, own_bounds), strict=True))
    assert (found["requests"], found["unanswered"], found["within"]) == (4, 1, 0.5)
    assert found["training"] == pytest.approx(30.0)
    assert found["first_token_p50"] == pytest.approx(0.5) and found["between_p50"] == pytest.approx(0.75)
    assert found["slowdown"] == pytest.approx((4.0 + 4.0 + 1.0) / 3)  # of those that were answered
    low, high = found["within_low"], found["within_high"]
    assert low == pytest.approx(0.0676, abs=1e-3) and high == pytest.approx(0.9324, abs=1e-3)
    assert 20.0 < found["training_low"] < 30.0 < found["training_high"] < 40.0  # type: ignore[operator]


def test_the_load_is_a_share_of_what_a_full_machine_answers() -> None:
    """At 0.5 the machine without training is busy half of the time at least, and not all of it."""
    half, full = runner(0.5, 60), runner(1.0, 60)
    half.poisson()
    full.poisson()
    assert full.column["rate"] == pytest.approx(2 * half.column["rate"])
    asked = half.given(half.column["rate"])
    assert asked.seconds * half.column["rate"] == pytest.approx(60)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", traffics(traced=True))
def test_every_policy_has_a_cell_of_every_traffic(name: str) -> None:
    it = runner(0.3, 6)
    traffics(traced=True)[name](it)
    cells = sheet.cells_of(it.column)
    assert {policy.partition(",")[0] for policy in cells} >= POLICIES.keys() | {ALONE}
    assert all(one["requests"] == cells[ALONE]["requests"] for one in cells.values())
    assert cells[ALONE]["unanswered"] == 0 and cells[ALONE]["training"] == 0
    assert cells["hybrid"]["unanswered"] == cells["adaptive"]["unanswered"] == 0


def test_policies_have_the_same_requests() -> None:
    first, second = runner(only=("hybrid",)), runner(only=("hybrid", "adaptive"))
    first.bursty()
    second.bursty()
    assert first.column["cells"]["hybrid"] == second.column["cells"]["hybrid"]


def test_who_never_gets_an_answer_is_named() -> None:
    it = runner(requests=5, only=("postpone-all",))
    it.poisson()
    cells = sheet.cells_of(it.column)
    assert cells["postpone-all"]["unanswered"] == 5 and cells["postpone-all"]["within"] == 0
    found = {
        "command": "c",
        "date": "d",
        "code": {"commit": "a" * 40},
        "cells": {"poisson": {"0.5": it.column}},
    }
    text = sheet.render(found)
    assert "**5 unanswered**" in text and "an anecdote" in text


def test_a_page_and_a_picture_of_a_file(tmp_path: Path) -> None:
    path, page, picture = tmp_path / "c.json", tmp_path / "p.md", tmp_path / "p.png"
    found = run_simulated(("flexllm",), path, loads=(0.5,), requests=4)
    assert found["code"].keys() == {"commit", "dirty", "version"}
    run_simulated(("answers",), path, further=True, loads=(0.5,), requests=4)
    both = json.loads(path.read_text())
    assert list(both["cells"]) == ["flexllm", "answers"] and both["earlier"][0]["groups"] == ["flexllm"]
    page.write_text(f"# Title\n\n{sheet.BEGIN}\nold\n{sheet.END}\n\nThe rest.\n")
    for out in (page, picture):
        assert CliRunner().invoke(app, ["bench", "draw", str(path), str(out)]).exit_code == 0
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("The rest.\n") and "old" not in text
    assert "### flexllm" in text and "### answers" in text and "| **adaptive** |" in text
    assert picture.stat().st_size > 1000
    page.write_text("nothing\n")
    with pytest.raises(ConfigError, match=r"no place for it: expected .<!-- cells"):
        sheet.write_cells(both, page)


def test_traffics_that_do_not_exist() -> None:
    found = CliRunner().invoke(app, ["bench", "policies", "--simulated", "--only", "azure"])
    assert isinstance(found.exception, ConfigError) and "without --trace" in str(found.exception)
    found = CliRunner().invoke(app, ["bench", "policies", "--simulated", "--only", "speed"])
    assert isinstance(found.exception, ConfigError) and "there are report" in str(found.exception)


def test_a_miss_of_a_policy_that_keeps_bounds_is_listed() -> None:
    rows = {
        ALONE: [300, 0, 1.0, 0.99, 1.0],
        "hybrid": [300, 2, 0.95, 0.92, 0.97],
        "continuous": [300, 9, 0.5, 0.4, 0.6],
    }
    cells = {name: [*row, *[1.0] * (len(FIGURES) - len(row))] for name, row in rows.items()}
    column = {"title": "T", "rate": 1.0, "peak": 2.0, "bounds": "b", "cells": cells}
    found = {"command": "c", "date": "d", "code": {"commit": None}, "cells": {"w": {"0.5": column}}}
    first = sheet.render(found).partition("###")[0]
    assert "Of 1 cells" in first and "| w | 0.5 | hybrid | 95.0% [92.0%, 97.0%] | 2 |" in first
    assert "continuous" not in first
