"""The arithmetic of `coserve bench replicas`, and what it says where PostgreSQL is not installed."""

from pathlib import Path
from typing import Any

import pytest

from coserve_benchmarks.replicas import handover, stores
from coserve_benchmarks.replicas.postgres import NOT_INSTALLED
from coserve_benchmarks.results import REPLICA_BARS, Results


class _Bench:
    def __init__(self, folder: Path) -> None:
        self.results = Results({"quick": True}, folder / "r.json", REPLICA_BARS)


def test_a_job_is_handed_over_with_the_first_new_step() -> None:
    seen = [(1.0, 3), (2.0, 25), (4.0, 25), (9.0, 25), (11.5, 26), (12.0, 30)]
    assert handover.handed_over(seen, 3.0) == 8.5
    assert handover.handed_over(seen[:4], 3.0) is None
    assert handover.handed_over([], 3.0) is None
    events: list[dict[str, Any]] = [
        {"type": "metrics", "data": {"step": 7}},
        {"type": "message", "data": {}},
        {"type": "metrics", "data": {"step": 2}},
    ]
    assert handover.steps_of(events) == [2, 7]


def test_databases_are_compared_round_by_round() -> None:
    slow, fast = iter((4.0, 9.0, 1.0, 8.0, 6.0)), iter((2.0, 3.0, 1.0, 2.0, 3.0))
    ratio = stores.compared(5, lambda: next(slow), lambda: next(fast))
    assert (ratio.value, ratio.low, ratio.high) == (2.0, pytest.approx(1.0), pytest.approx(4.0))


@pytest.mark.parametrize(
    ("module", "key"), [(handover, "failover.job_handed_over"), (stores, "store.postgres_over_sqlite")]
)
def test_without_postgresql_a_row_says_so(
    module: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "programs", lambda: None)
    bench = _Bench(tmp_path)
    module.run(*((bench, []) if module is handover else (bench,)))
    found = bench.results.as_dict()
    assert key not in found and found["notes"][key] == NOT_INSTALLED
