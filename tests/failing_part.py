"""A part of `make gpu` that finds something, and then fails."""

from coserve_benchmarks.gpu.log import PartLog


def run_bare(log: PartLog, device: str) -> None:
    log.figure("before", 1.0, "figure")
    raise RuntimeError(f"nothing works on {device}")
