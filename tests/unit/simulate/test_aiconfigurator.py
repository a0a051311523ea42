"""Measured kernel tables: a roofline has the efficiencies that tables were made with; what is wrong is one
error."""

import sys
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.simulate.aiconfigurator import PACKAGE, measured_roofline
from coserve.simulate.counting import PlanCounter
from coserve.simulate.hardware import Roofline
from coserve.simulate.times import table_named, times_on
from coserve.workload.shapes import shape_named

pytest.importorskip("pyarrow")
PEAK, BANDWIDTH = 100e12, 1e12
SHEET = """gpu:
  mem_bw: 1000000000000
  mem_capacity: 80000000000
  bfloat16_tc_flops: 100000000000000
node:
  intra_node_bw: 300000000000
  pcie_bw: 32000000000
"""


def write(path: Path, rows: list[dict[str, object]]) -> None:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def product(m: int, n: int, k: int, seconds: float, dtype: str = "bfloat16") -> dict[str, object]:
    return {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": seconds * 1e3}


def attention(length: int, share: float, head: int = 128) -> dict[str, object]:
    seconds = 4 * 2 * length * (length + 1) / 2 * 32 * head / (share * PEAK)
    return {
        "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "batch_size": 2, "isl": length,
        "num_heads": 32, "head_dim": head, "step": 0, "window_size": 0, "latency": seconds * 1e3,
    }  # fmt: skip


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one system: products at 60 % of the peak or 75 % of the bandwidth."""
    folder = tmp_path / PACKAGE / "systems"
    (folder / "data").mkdir(parents=True)
    (tmp_path / PACKAGE / "__init__.py").write_text("raise AssertionError('nothing of it runs')")
    (folder / "x_sxm.yaml").write_text(SHEET)
    rows = [
        product(m, n, 8192, max(2 * m * n * 8192 / (0.6 * PEAK), 2 * n * 8192 / (0.75 * BANDWIDTH)))
        for m in (1, 3, 64, 1024)
        for n in (4096, 8192)
    ]
    rows += [product(1, 16, 16, 1.0), product(1, 4096, 8192, 1.0, "fp8")]  # too small, another type
    write(folder / "data/x_sxm/gemm/vllm/0.24.0/gemm_perf.parquet", rows)
    write(folder / "data/x_sxm/gemm/vllm/0.9.0/gemm_perf.parquet", [product(1, 4096, 8192, 1.0)])
    write(folder / "data/x_sxm/gemm/sglang/9.0/gemm_perf.parquet", [product(1, 4096, 8192, 1.0)])
    rows = [attention(2048, 0.4), attention(4096, 0.4), attention(16, 0.01), attention(2048, 0.9, 64)]
    write(folder / "data/x_sxm/attention/vllm/0.24.0/context_attention_perf.parquet", rows)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return folder


def test_efficiencies_are_those_of_the_newest_table_of_vllms_kernels(systems: Path) -> None:
    table = measured_roofline("aiconfigurator:x_sxm")
    assert table.efficiency.bandwidth == pytest.approx(0.75)
    assert table.efficiency.attention == pytest.approx(0.4)
    points = dict(table.efficiency.rows)
    assert points.keys() == {1, 64, 1024}  # powers of two
    assert points[1024] == pytest.approx(0.6)
    assert points[1] == pytest.approx(
        2 * 0.75 * BANDWIDTH / 2 / PEAK
    )  # of a row, as long as weights are read
    assert (table.memory_nbytes, table.peak_tflops["bfloat16"]) == (80e9, 100)
    assert (table.link_gbs, table.host_link_gbs) == (300, 32)
    assert "vllm 0.24.0" in table.sources["efficiency"]


def test_it_is_hardware_like_any_other(systems: Path) -> None:
    assert isinstance(table_named("aiconfigurator:x_sxm"), Roofline)
    shape = shape_named("8b")
    times, table = times_on("aiconfigurator:x_sxm", PlanCounter(shape, shape.lora_weights(8)))
    assert times.layers == 32 and table.name == "x_sxm, measured"


def test_what_is_not_there_or_wrong_is_one_error(systems: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no system 'y'; it has x_sxm"):
        measured_roofline("aiconfigurator:y")
    with pytest.raises(ConfigError, match=r"no system '\.\./x'"):
        measured_roofline("aiconfigurator:../x")
    (systems / "x_sxm.yaml").write_text(SHEET.replace("pcie_bw: 32000000000", "pcie_bw: fast"))
    with pytest.raises(ConfigError, match=r"x_sxm\.yaml: node\.pcie_bw: expected a positive number"):
        measured_roofline("aiconfigurator:x_sxm")
    (systems / "x_sxm.yaml").write_text(SHEET)
    broken = systems / "data/x_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    broken.write_bytes(b"not a table")
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet: expected a table with m, n, k, latency"):
        measured_roofline("aiconfigurator:x_sxm")
    write(broken, [{"gemm_dtype": "bfloat16", "m": 1}])
    with pytest.raises(ConfigError, match="expected a table with"):
        measured_roofline("aiconfigurator:x_sxm")
    write(broken, [product(1, 16, 16, 1.0)])
    with pytest.raises(ConfigError, match="no bfloat16 products and attention of x_sxm measured"):
        measured_roofline("aiconfigurator:x_sxm")


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coserve.simulate.aiconfigurator.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need aiconfigurator-core, which coserve\[measured\] installs"):
        measured_roofline("aiconfigurator:h100_sxm")
