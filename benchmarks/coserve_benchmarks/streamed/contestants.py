"""Runs the bench's contestants, each in a process of its own."""

import sys
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import ServerError
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.streamed.limit import Limited, run_limited
from coserve_benchmarks.streamed.orders import Act, StreamedOrder, StreamedReport

_SHAPES: Final = 64  # of products whose code oneDNN keeps, of 0.65 MB each; 256 by default
_PATIENCE: Final = 3600.0  # seconds of one contestant
_QUICK: Final = {"rounds": 1, "bound_rounds": 1, "steps": 2, "answer": 3}


def order_for(bench: Bench, model: Path, quick: bool) -> StreamedOrder:
    """An order on a model's folder, with a folder beside it for scratch files."""
    scratch = model.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    order = StreamedOrder(
        act="size",
        folder=str(model),
        scratch=str(scratch),
        threads=bench.machine.threads,
        seed=bench.settings.seed,
        vocabulary=bench.shape.vocabulary,
    )
    return msgspec.structs.replace(order, **_QUICK) if quick else order


def run_contestant(order: StreamedOrder, act: Act, limit: int) -> Limited:
    """Has a process do one act of an order under a limit, bytes."""
    few = {name: str(_SHAPES) for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")}
    given = msgspec.json.encode(msgspec.structs.replace(order, act=act)).decode()
    command = [sys.executable, "-m", "coserve_benchmarks.streamed.child"]
    return run_limited(command, given, limit, _PATIENCE, few)


def read_report(ended: Limited) -> StreamedReport:
    """A contestant's answer. Raises ServerError where it failed."""
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()[-3:]
        raise ServerError(f"a contestant ended with {ended.returncode}: {' '.join(lines)}")
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=StreamedReport)
