"""`coserve bench zoo` makes its applications, and counts their bytes."""

import json
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve_benchmarks.zoo.run import BARS, run_zoo


@pytest.mark.slow
def test_the_table_is_filled(tmp_path: Path) -> None:
    results = run_zoo(True, None, tmp_path / "zoo.json", tmp_path / "chains.svg")
    assert json.loads((tmp_path / "zoo.json").read_text())["storage.exact"] == results["storage.exact"]
    assert set(results["bars"]) == set(BARS)
    assert 0.0 < results["storage.with_alternatives"] <= results["storage.exact"] < 1.0
    assert "20 applications" in results["notes"]["storage.exact"]
    assert "full-6" in (tmp_path / "chains.svg").read_text()


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no group"):
        run_zoo(True, ["other"])
