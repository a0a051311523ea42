"""The bench of pages, on the smallest sizes."""

from pathlib import Path

import pytest

from coserve_benchmarks.memory import eight_bits
from coserve_benchmarks.memory.run import run_memory


@pytest.mark.slow
def test_a_prefix_that_is_found_takes_less_and_eight_bits_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bits, "_LENGTH", 30)
    results = run_memory("tiny", quick=True, only=["prefix"], json_path=tmp_path / "m.json")
    assert results["prefix.ttft_ratio"] > 0 and (tmp_path / "m.json").exists()
    figures = {name: figure["value"] for name, figure in results["figures"].items()}
    assert figures["prefix.again"] > 0 and figures["prefix.first"] > 0 and figures["prefix.naming"] > 0
    assert figures["cache8.bytes"] == (16 + 4) / 32  # heads of 16
    assert 0 < figures["cache8.logit_error"] < figures["cache8.logit_error_most"] < 1.0
    assert figures["cache8.int8_rate"] > 0 and figures["cache8.auto_rate"] > 0
