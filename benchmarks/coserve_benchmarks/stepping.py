"""Row `step.overhead`: what a decode step of a small model takes beside the products of its linears."""

import time
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

from coserve.executors.local import LocalExecutor
from coserve.kernels.native import ops
from coserve.model.base import Base
from coserve.model.placement import Placement
from coserve.workload.shapes import shape_named
from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.remote import STEPS, decode_step
from coserve_benchmarks.timing import alternate

SHAPE: Final = "19m"  # coserve-tiny's
SEQUENCES: Final = 32
_REPEATS: Final = 24  # of the products in a round


def run(bench: Bench) -> None:
    """Decode steps of 32 sequences, and the products of all linears on as many rows, in turn. The row is the
    median difference, in milliseconds: planning, Python, attention and element-wise work. The figure
    `step.kernels` is a step's time inside of compiled kernels, products and attention among them."""
    small = replace(bench, shape=shape_named(SHAPE))
    engine = make_engine(small, calibrate=False)
    executor = engine.executor
    assert isinstance(executor, LocalExecutor)
    clock = KernelClock()
    clocked = decode_step(small, engine, SEQUENCES, clock)
    contestants = {
        "step": decode_step(small, engine, SEQUENCES),
        "kernels": lambda: (clocked(), clock.seconds / STEPS)[1],
        "products": seconds_of(products(executor.worker.base, SEQUENCES)),
    }
    times = alternate(contestants, bench.settings.rounds, bench.machine.threads)
    for name, taken in times.items():
        spread = (taken.low * 1e3, taken.high * 1e3)
        bench.results.figure(f"step.{name}", taken.median * 1e3, "ms", spread)
    pairs = zip(times["step"].seconds, times["products"].seconds, strict=True)
    rest = [(step - bare) * 1e3 for step, bare in pairs]
    note = f"ms of a decode step of {SEQUENCES} sequences of the {SHAPE} shape, less its linears called alone"
    bench.results.row("step.overhead", median(rest), interval(np.median, rest), note)


class KernelClock:
    """Context that counts the `seconds` in which compiled kernels run; each call takes a microsecond more."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._loaded = ops.loaded

    def __enter__(self) -> None:
        self.seconds = 0.0
        ops.loaded = lambda like: _Timed(self, self._loaded(like))  # type: ignore[assignment, return-value]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ops.loaded = self._loaded


class _Timed:
    """Kernels whose seconds a clock counts."""

    def __init__(self, clock: KernelClock, kernels: CDLL) -> None:
        self._clock, self._kernels = clock, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def run(*args: Any) -> Any:
            started = time.perf_counter()
            given = kernel(*args)
            self._clock.seconds += time.perf_counter() - started
            return given

        return run


def products(base: Base, rows: int) -> list[Callable[[], object]]:
    """The product of each linear of a base, on random rows of its own."""
    found: list[Callable[[], object]] = []
    for linear in base.linears.values():
        x = torch.randn(1, rows, linear.in_features).to(base.dtype)
        found.append(partial(_product, linear.placement, x))
    return found


@torch.no_grad()
def _product(placement: Placement, x: torch.Tensor) -> None:
    placement.forward(x)


def seconds_of(calls: list[Callable[[], object]]) -> Callable[[], float]:
    """A contestant: the seconds that all calls take, one after another, in the median of a few times."""

    def run() -> float:
        taken = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            for call in calls:
                call()
            taken.append(time.perf_counter() - started)
        return median(taken)

    return run
