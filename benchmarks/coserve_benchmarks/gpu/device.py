"""Part `device`: what there is, and its rates."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from coserve.engine.remembered import device_name
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import measure_rates

_PACKAGES: Final = ("torch", "triton", "transformers", "tokenizers", "msgspec", "llguidance")


def run_bare(log: PartLog, device: str) -> None:
    """Notes the versions, and measures the rates."""
    where = torch.empty(0, device=device).device
    facts = [("device", device_name(where)), ("Python", platform.python_version())]
    facts += [(name, _version(name)) for name in _PACKAGES]
    if where.type == "cuda":
        found = torch.cuda.get_device_properties(where)
        facts += [
            ("CUDA", str(torch.version.cuda)),
            ("multiprocessors", str(found.multi_processor_count)),
            ("memory", f"{found.total_memory / 1e9:.0f} GB"),
            ("capability", f"{found.major}.{found.minor}"),
        ]
    log.table("facts", [("what", "it is"), *facts])
    rates = measure_rates(where)
    log.figure("device.bandwidth", rates.bandwidth / 1e9, "GB/s", note="the faster of a copy and a sum")
    log.figure("device.matrix_rate", rates.matrix_rate / 1e12, "TFLOP/s", note="a bfloat16 product")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
