from itertools import pairwise
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.workload.arrivals import poisson_times
from coserve.workload.requests import poisson_requests, training_tokens
from coserve.workload.trace_formats import read_trace
from coserve.workload.traces import scale_trace

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.6805900,1000,1
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_scaling_says_by_how_much(trace: Path) -> None:
    scaled = scale_trace(read_trace(trace), rate=0.3, seconds=10.0, longest_prompt=100, longest_answer=218)
    assert scaled.time_scale == pytest.approx(10.0 * 3 / 4 / 5.0)
    assert scaled.prompt_scale == pytest.approx(0.1)
    assert scaled.answer_scale == 1.0  # lengths are never stretched
    assert [row.at for row in scaled.rows] == pytest.approx([0.0, 4.314579 * 1.5, 7.5])
    assert [(row.prompt, row.answer) for row in scaled.rows] == [(37, 44), (40, 109), (100, 1)]
    assert "3 requests of the trace, gaps x 1.5, prompts x 0.1, answers x 1" in scaled.describe()


def test_scaled_lengths_are_at_least_one(trace: Path) -> None:
    rows = read_trace(trace)
    scaled = scale_trace(rows, rate=0.3, seconds=10.0, longest_prompt=1, longest_answer=1)
    assert all((row.prompt, row.answer) == (1, 1) for row in scaled.rows)


def test_poisson_offers_exactly_the_load_asked_for() -> None:
    times = poisson_times(rate=4.0, seconds=60.0, seed=3)
    assert len(times) == 240
    assert times == sorted(times)
    assert min(times) >= 0.0
    assert max(times) < 60.0


def test_poisson_gaps_are_exponential() -> None:
    times = poisson_times(rate=10.0, seconds=2000.0, seed=0)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.01)
    # Of an exponential distribution, exp(-1) lies beyond its mean.
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_seeds_decide_everything() -> None:
    first = poisson_requests(2.0, 5.0, prompt=7, answer=3, vocabulary=11, seed=1)
    assert first == poisson_requests(2.0, 5.0, prompt=7, answer=3, vocabulary=11, seed=1)
    assert first != poisson_requests(2.0, 5.0, prompt=7, answer=3, vocabulary=11, seed=2)
    assert all(len(r.prompt) == 7 and r.answer == 3 and set(r.prompt) <= set(range(11)) for r in first)


def test_training_tokens_have_the_lengths_given() -> None:
    assert [len(tokens) for tokens in training_tokens([3, 9, 1], vocabulary=5)] == [3, 9, 1]


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_a_load_needs_a_rate_and_a_duration(rate: float, seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive rate"):
        poisson_times(rate, seconds)
