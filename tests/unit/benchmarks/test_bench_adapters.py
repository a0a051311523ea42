"""The bench of many adapters, on the smallest sizes."""

import json
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.adapters.run import run_adapters
from coserve_benchmarks.adapters.sizes import AdapterSizes, adapter_bytes, mean_rank, ranks_of
from coserve_benchmarks.settings import FULL, TINY


def test_ranks_are_a_quarter_each_and_bytes_those_of_every_linear() -> None:
    assert ranks_of("rank8", 32) == [8] * 32
    assert [ranks_of("mixed", 32).count(rank) for rank in (16, 32, 64, 128)] == [8] * 4
    assert mean_rank("mixed") == 60 == sum(ranks_of("mixed", 32)) / 32
    shape = shape_named("255m")
    widths = [(1024, 1024), (1024, 512), (1024, 512), (1024, 1024), (1024, 2816), (1024, 2816), (2816, 1024)]
    assert adapter_bytes(shape, [8]) == 2 * 16 * 8 * sum(map(sum, widths))
    assert adapter_bytes(shape, ranks_of("mixed", 32)) == pytest.approx(1.15e9, rel=0.01)


def test_the_sizes_of_the_table() -> None:
    sizes = AdapterSizes.of(FULL, shape_named("255m"), quick=False)
    assert (sizes.rows, sizes.counts[-1], sizes.trained, sizes.jobs * sizes.job_tokens) == (64, 32, 16, 1024)
    assert sizes.tokens >= 8192 and sizes.rounds == FULL.rounds
    assert AdapterSizes.of(TINY, shape_named("tiny"), quick=True).rows < 64


@pytest.mark.sample(1)
@pytest.mark.parametrize("series", ["rank8", "mixed"])
def test_decode_steps_are_measured_beside_their_floors_and_peers(series: str, tmp_path: Path) -> None:
    path = tmp_path / "adapters.json"
    results = run_adapters("tiny", quick=True, only=[series], json_path=path)
    assert json.loads(path.read_text()).keys() == results.keys()
    keys = {f"{series}.decode.vs_single[2]", f"{series}.decode.vs_single[4]", f"{series}.decode.vs_base"}
    keys |= {f"{series}.decode.vs_peft_mixed"} | ({"mixed.decode.vs_floor"} if series == "mixed" else set())
    assert {key for key in results if key in results["bars"]} == keys
    for name in ("base", "single", "4"):
        assert results["floors"][f"{series}.decode.step[{name}]"] > 0
    figures = results["figures"]
    assert figures[f"{series}.decode.bytes[4]"]["value"] == pytest.approx(
        sum(ranks_of(series, 4)) / mean_rank(series) * figures[f"{series}.decode.bytes[single]"]["value"]
    )
    assert {f"{series}.decode.step[peft_mixed]", f"{series}.decode.step[naive]"} <= figures.keys()


@pytest.mark.slow
def test_training_is_measured() -> None:
    results = run_adapters("tiny", quick=True, only=["train"])
    assert all(results[key] > 0 for key in ("train.vs_single[2]", "train.vs_sequential"))


def test_jobs_of_different_ranks_are_measured() -> None:
    results = run_adapters("tiny", quick=True, only=["jobs"])
    assert results["train.mixed[4]"] > 0
    assert results["figures"]["train.mixed[together]"]["value"] > 0


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="no group"):
        run_adapters("tiny", quick=True, only=["paging"])
