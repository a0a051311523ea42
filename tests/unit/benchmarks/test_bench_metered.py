"""Group `metered`, briefly: that its figures are there, and what they are counted from."""

import math

import pytest

from coserve.core.request import SLO
from coserve_benchmarks import metered
from coserve_benchmarks.engine import run_engine
from coserve_benchmarks.results import BARS
from ticking import ticking

TICK = 2e-5  # seconds: whenever the host reads the clock
KEYS = [key for key in BARS if key.startswith("metered.")]


def test_it_has_a_bar_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, TICK)
    results = run_engine("tiny", quick=True, only=["metered"])
    assert [key for key in KEYS if key in results] == KEYS
    assert all(math.isfinite(results[key]) and results[key] >= 0 for key in KEYS)
    assert results["metered.fifth.training"] > 0
    figures = results["figures"]
    assert figures["metered.alone"]["value"] == pytest.approx(13_267, rel=0.05), "the table's"
    assert figures["metered.host.one_at_a_time"]["value"] > 0


def test_what_the_arithmetic_leaves_to_training() -> None:
    """Fewer answers leave more of the device, and so do longer steps."""
    found = {case.name: metered.most_training(case) for case in metered.CASES}
    assert 0.3 < found["20ms"] < found["50ms"] < found["fifth"] < 1.0
    busy = metered.Case("busy", 1.5, 0.02)
    assert metered.most_training(busy) < found["20ms"]


def test_a_bound_that_no_step_can_keep_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attainment counts the answers' own times."""
    ticking(monkeypatch, TICK)
    load = metered.serve("hybrid", 0, 1.0, SLO(first_token=2.0, between_tokens=0.004), 0.5).load
    assert load.answers and load.attainment(SLO(between_tokens=0.004)) == 0.0
