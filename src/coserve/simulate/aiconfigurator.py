"""Reads measured kernel tables of `aiconfigurator-core` (NVIDIA, Apache-2.0; the extra `measured`) as a
roofline.

The package has seconds of products, attention and all-reduces by device, serving framework and version. The
efficiencies of a roofline are taken from these: of products the share of the peak by rows, which has the time
that reading weights takes in it; of attention the median; the bandwidth that one row's products reach.
Overheads of a layer, an optimizer step and the host are not measured there, and stay as assumed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from coserve.errors import ConfigError
from coserve.simulate.hardware import Efficiency, Overhead, Roofline
from coserve.simulate.jitter import Jitter

PREFIX: Final = "aiconfigurator:"  # of the names of hardware
PACKAGE: Final = "aiconfigurator_core"
_FRAMEWORK: Final = "vllm"
_DTYPE: Final = "bfloat16"
_WEIGHTS: Final = (1 << 24, 1 << 28)  # of the products that count: those of decoder layers of 7B to 70B
_HEAD: Final = 128  # channels of the heads that count
_LONG: Final = 1024  # tokens from which on attention is more than its overhead
_GIGA: Final = 1e9
_TERA: Final = 1e12
_MILLI: Final = 1e-3
_ASSUMED: Final = Overhead(layer_us=6.0, reduction_us=12.0, update_us=500.0, host_us=1240.0)


def measured_roofline(name: str) -> Roofline:
    """The table of a system such as `aiconfigurator:h100_sxm`. Raises ConfigError where the package or the
    system is not there, or has no measured products."""
    folder, system = _systems(), name.removeprefix(PREFIX)
    sheet = folder / f"{system}.yaml"
    if not re.fullmatch(r"\w+", system) or not sheet.is_file():
        known = ", ".join(
            sorted(path.stem for path in folder.glob("*.yaml") if _has_products(folder, path.stem))
        )
        raise ConfigError(f"aiconfigurator-core has no system {system!r}; it has {known}")
    data = folder / "data" / system
    sheets = _sheet(sheet)
    gpu, node = sheets["gpu"], sheets["node"]
    peak, bandwidth = float(gpu[f"{_DTYPE}_tc_flops"]), float(gpu["mem_bw"])
    products, by = _rows(data, "gemm", "gemm_perf", ("m", "n", "k", "latency"), {"gemm_dtype": _DTYPE})
    attention, _ = _rows(
        data,
        "attention",
        "context_attention_perf",
        ("batch_size", "isl", "num_heads", "latency"),
        {"attn_dtype": _DTYPE, "kv_cache_dtype": _DTYPE, "head_dim": _HEAD, "step": 0, "window_size": 0},
    )
    sized = [one for one in products if _WEIGHTS[0] <= one["n"] * one["k"] <= _WEIGHTS[1]]
    read = [2 * one["n"] * one["k"] / (one["latency"] * _MILLI) for one in sized if one["m"] == 1]
    shares = [*_attention_shares(attention, peak)]
    if not (read and shares):
        raise ConfigError(f"aiconfigurator-core has no {_DTYPE} products and attention of {system} measured")
    source = f"aiconfigurator-core {_version()}, {by}"
    return Roofline(
        name=f"{system}, measured",
        memory_gb=float(gpu["mem_capacity"]) / _GIGA,
        bandwidth_gbs=bandwidth / _GIGA,
        peak_tflops={_DTYPE: peak / _TERA, "float16": peak / _TERA},
        link_gbs=float(node["intra_node_bw"]) / _GIGA,
        host_link_gbs=float(node["pcie_bw"]) / _GIGA,
        efficiency=Efficiency(
            rows=tuple(_product_shares(sized, peak)),
            bandwidth=min(median(read) / bandwidth, 1.0),
            attention=min(median(shares), 1.0),
        ),
        overhead=_ASSUMED,
        jitter=Jitter(0.02, 0.001, 1.5),
        sources={
            "peaks, bandwidths and memory": f"aiconfigurator-core {_version()}, systems/{sheet.name}",
            "efficiency": f"measured: {source}; products of {_WEIGHTS[0]:,} to {_WEIGHTS[1]:,} weights",
            "overhead": "assumed, not measured, as in the package's own tables",
            "jitter": "assumed, not measured, as in the package's own tables",
        },
    )


def _systems() -> Path:
    """The folder of all systems. Raises ConfigError where the package is not installed."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError("measured kernel tables need aiconfigurator-core, which coserve[measured] installs")
    return Path(found.submodule_search_locations[0]) / "systems"


def _version() -> str:
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:  # a copy of its folder
        return "of unknown version"


def _sheet(path: Path) -> Mapping[str, Any]:
    """A system's sheet. Raises ConfigError, with the field at fault."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected a system's sheet: {error}") from error
    wanted = {
        "gpu": ("mem_bw", "mem_capacity", f"{_DTYPE}_tc_flops"),
        "node": ("intra_node_bw", "pcie_bw"),
    }
    for part, names in wanted.items():
        for name in names:
            value = (found.get(part) or {}).get(name) if isinstance(found, dict) else None
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{path}: {part}.{name}: expected a positive number, not {value!r}")
    checked: Mapping[str, Any] = found
    return checked


def _has_products(folder: Path, system: str) -> bool:
    return any((folder / "data" / system / "gemm").glob("*/*/gemm_perf.parquet"))


def _rows(
    data: Path, kind: str, file: str, columns: tuple[str, ...], equal: Mapping[str, object]
) -> tuple[list[dict[str, Any]], str]:
    """Rows of the newest table of a kind, of vLLM's kernels where there are some, and what they are of.
    Raises ConfigError where there is no such table, or it cannot be read."""
    tables = sorted((data / kind).glob(f"*/*/{file}.parquet"), key=_order)
    if not tables:
        raise ConfigError(f"aiconfigurator-core has no table {file} of {data.name}")
    path = tables[-1]
    try:
        import pyarrow
        from pyarrow import parquet

        read = parquet.read_table(
            path, columns=[*columns], filters=[(name, "=", value) for name, value in equal.items()]
        )
    except ImportError as error:
        raise ConfigError("measured kernel tables need pyarrow, which coserve[measured] installs") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{path}: expected a table with {', '.join((*columns, *equal))}: {error}"
        ) from error
    rows: list[dict[str, Any]] = read.to_pylist()
    return [row for row in rows if row["latency"] > 0], f"{path.parts[-3]} {path.parts[-2]}"


def _order(path: Path) -> tuple[bool, tuple[int, ...]]:
    """vLLM's tables last, and of these the newest version."""
    return path.parts[-3] == _FRAMEWORK, tuple(int(part) for part in re.findall(r"\d+", path.parts[-2]))


def _product_shares(products: Iterable[Mapping[str, Any]], peak: float) -> Iterator[tuple[float, float]]:
    """(rows, median share of the peak), at powers of two."""
    found: dict[int, list[float]] = {}
    for one in products:
        rows = one["m"]
        if rows & (rows - 1) == 0:
            share = 2 * rows * one["n"] * one["k"] / (one["latency"] * _MILLI) / peak
            found.setdefault(rows, []).append(share)
    for rows, shares in sorted(found.items()):
        yield float(rows), min(median(shares), 1.0)


def _attention_shares(attention: Iterable[Mapping[str, Any]], peak: float) -> Iterator[float]:
    """Shares of the peak of causal attention over long prompts: four operations a pair and channel."""
    for one in attention:
        length = one["isl"]
        if length >= _LONG:
            pairs = one["batch_size"] * length * (length + 1) / 2
            yield 4 * pairs * one["num_heads"] * _HEAD / (one["latency"] * _MILLI) / peak
