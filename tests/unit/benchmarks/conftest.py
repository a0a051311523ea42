"""Engines of benches measure what their steps cost, seconds each: here those of one size do once, and run
each kind of step once. What a bench counts does not depend on how certain the costs are."""

from collections.abc import Hashable, Iterator

import pytest

from coserve.engine import calibrate, engine
from coserve.executors.executor import Executor
from coserve.model.base import Base

_MEASURED: dict[Hashable, calibrate.Calibration] = {}
_INTERFERENCE: dict[Hashable, tuple[float, float] | None] = {}
_MOST_TOKENS = 8192  # no step that is measured has as many in the cache


def _size(executor: Executor, base: Base, page_size: int, pages: int) -> Hashable:
    """Of what decides which steps are measured."""
    limit = min(page_size * pages, base.max_positions, _MOST_TOKENS)
    return type(executor), executor.spec.sequences, base.fingerprint, str(base.dtype), page_size, limit


def _measure_once(
    executor: Executor, base: Base, page_size: int, pages: int, lean: bool
) -> calibrate.Calibration:
    key = _size(executor, base, page_size, pages), lean
    if key not in _MEASURED:
        _MEASURED[key] = calibrate.measure(executor, base, page_size, pages, lean=lean)
    return _MEASURED[key]


def _measure_interference_once(
    executor: Executor, base: Base, page_size: int, pages: int
) -> tuple[float, float] | None:
    key = _size(executor, base, page_size, pages)
    if key not in _INTERFERENCE:
        _INTERFERENCE[key] = calibrate.measure_interference(executor, base, page_size, pages)
    return _INTERFERENCE[key]


@pytest.fixture(autouse=True, scope="module")
def measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_ROUNDS", 1)
        patch.setattr(engine, "measure", _measure_once)
        patch.setattr(engine, "measure_interference", _measure_interference_once)
        yield
