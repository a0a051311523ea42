"""A trace as load: lengths that fit the model, arrivals that fit the machine."""

from pathlib import Path

import pytest

from coserve.core.request import SLO
from coserve.demo.lessons import Lesson
from coserve.demo.requests import DemoRequest
from coserve.demo.trace import TraceLoad, TraceRequests, describe, read_load
from coserve.errors import DataError
from coserve.workload.trace_formats import TraceRow

ROWS = tuple(TraceRow(at=float(i), prompt=1000 if i % 2 else 3000, answer=100) for i in range(100))
LOAD = TraceLoad(ROWS, longest_prompt=300, longest_answer=50)
TEXT = tuple(range(1000))
LESSONS = [Lesson(name, "speaks", (), (), exact=True) for name in ("a", "b")]


def test_lengths_shrink_to_the_models_positions_and_arrivals_to_the_rate() -> None:
    scaled = LOAD.at_rate(4.0)
    assert {row.prompt for row in scaled.rows} == {100, 300}
    assert {row.answer for row in scaled.rows} == {50}
    assert scaled.rows[-1].at == pytest.approx(100 / 4.0, rel=0.02)


def test_what_was_scaled_is_said_and_reckoned() -> None:
    scaled = LOAD.at_rate(4.0)
    said, figures = describe(scaled, LOAD, capacity=8.0)
    assert "50% of the 8.00 a second" in said
    assert f"gaps x {scaled.time_scale:.3g}" in said
    assert "mean 2000 -> 200 and 100 -> 50 tokens" in said
    assert figures["rate"] == pytest.approx(4.0, rel=0.05)
    assert figures["prompt_scale"] == pytest.approx(0.1)


def test_reading_takes_the_longest_prompt_and_answer_from_the_positions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,1396,109\n"
    )
    load = read_load(trace, positions=1024)
    assert (load.longest_prompt, load.longest_answer) == (768, 256)
    assert max(row.prompt for row in load.at_rate(1.0).rows) == 768
    # More positions than the demo has time for do not make longer prompts.
    assert read_load(trace, positions=1 << 20).longest_prompt == 1536


def test_a_slow_beginning_is_skipped(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = [3 * i for i in range(20)] + [60 + i // 2 for i in range(200)]
    lines = [f"2023-11-16 18:{15 + at // 60:02d}:{at % 60:02d}.0000000,100,10" for at in times]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    load = read_load(trace, positions=1024)
    assert 0 < load.skipped <= 20
    assert load.rows[0].at == 0.0 and len(load.rows) == 220 - load.skipped


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(DataError, match="at least one request"):
        read_load(trace, 1024)


def requests_of(rate: float, seconds: float, text: tuple[int, ...] = TEXT) -> list[DemoRequest]:
    return TraceRequests(LOAD, text, LESSONS, SLO(slowdown=1.5)).requests(rate, seconds)


def test_requests_arrive_when_the_trace_says() -> None:
    asked = requests_of(10.0, 1.0)
    expected = [row for row in LOAD.at_rate(10.0).rows if row.at < 1.0]
    assert [request.at for request in asked] == [row.at for row in expected]
    assert [len(request.prompt) for request in asked] == [row.prompt for row in expected]
    assert all(r.sampling.ignore_eos and r.sampling.max_tokens == r.answer == 50 for r in asked)
    assert {request.slo for request in asked} == {SLO(slowdown=1.5)}


def test_a_trace_begins_again_when_it_runs_out() -> None:
    times = [request.at for request in requests_of(10.0, 30.0)]
    assert 290 <= len(times) <= 300  # ten a second
    assert times == sorted(times) and times[-1] > 29.0


def test_every_fourth_request_goes_to_an_adapter_in_turn() -> None:
    asked = [request.adapter for request in requests_of(10.0, 1.6)]
    assert asked[:9] == ["a", None, None, None, "b", None, None, None, "a"]
