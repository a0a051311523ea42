"""A trace as load: lengths that fit the model, arrivals that fit the machine."""

from pathlib import Path

import pytest

from coserve.demo.load_generator import DemoRequest
from coserve.demo.trace import TraceArrivals, TraceBacklog, TraceLoad, describe, read_load
from coserve.errors import DataError
from coserve.workload.trace_formats import TraceRow

ROWS = tuple(TraceRow(at=float(i), prompt=1000 if i % 2 else 3000, answer=100) for i in range(100))
LOAD = TraceLoad(ROWS, longest_prompt=300, longest_answer=50)
TEXT = tuple(range(1000))


def test_lengths_shrink_to_the_models_positions_and_arrivals_to_the_rate() -> None:
    scaled = LOAD.at_rate(4.0)
    assert {row.prompt for row in scaled.rows} == {100, 300}
    assert {row.answer for row in scaled.rows} == {50}
    assert scaled.rows[-1].at == pytest.approx(100 / 4.0, rel=0.02)
    assert LOAD.tokens_per_request == 250.0


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


def test_requests_arrive_when_the_trace_says_whether_or_not_answers_came() -> None:
    scaled = LOAD.at_rate(10.0)
    source = TraceArrivals(scaled, TEXT)
    first = list(source.due(100.0))
    assert [request.at for request in first] == [100.0]
    later = list(source.due(101.0))
    expected = [row.at for row in scaled.rows if 0.0 < row.at <= 1.0]
    assert [request.at for request in later] == [pytest.approx(100.0 + at) for at in expected]
    assert not list(source.due(101.0))


def test_a_trace_begins_again_when_it_runs_out() -> None:
    source = TraceArrivals(LOAD.at_rate(10.0), TEXT)
    asks = [*source.due(0.0), *source.due(30.0)]
    assert 290 <= len(asks) <= 305  # ten a second
    times = [request.at for request in asks if request.at is not None]
    assert times == sorted(times)


def test_every_fourth_request_goes_to_an_adapter_in_turn() -> None:
    source = TraceArrivals(LOAD.at_rate(10.0), TEXT, ("a", "b"))
    asks = [*source.due(0.0), *source.due(1.6)]
    assert [request.adapter for request in asks][:9] == ["a", None, None, None, "b", None, None, None, "a"]


def test_a_backlog_fills_the_seats_as_they_become_free() -> None:
    source = TraceBacklog(LOAD.at_rate(1.0), TEXT, seats=3)
    asks: list[DemoRequest] = list(source.due(0.0))
    assert len(asks) == 3 and not list(source.due(1.0))
    source.answered(asks[0], "")
    (following,) = source.due(2.0)
    assert len(following.prompt) == 100
    assert following.sampling.ignore_eos and following.sampling.max_tokens == 50
