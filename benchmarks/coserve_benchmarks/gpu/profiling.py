"""Part `profile`: where the time of a decode step goes, on the device and on the host."""

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from coserve_benchmarks.gpu.decode import decoding, finish, room
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.place import Place, synchronize

_ROWS: Final = 32
_STEPS: Final = 3  # profiled ones
_WARM: Final = 3
_MOST: Final = 20  # kernels, and places, in a table
_COSERVE: Final = ("/coserve/", "/transformers/")


def run(log: PartLog, place: Place) -> None:
    """Some decode steps under torch's profiler; then one that tells where the host waits for the device."""
    rows = min(_ROWS, max(place.sizes.decode_rows))
    engine = place.engine(rows * room(place), max_running=rows)
    handles = decoding(engine, place, [None] * rows, place.sizes.context)
    for _ in range(_WARM):
        engine.step()
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        _waits(log, engine.step)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        started = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
        synchronize(place.device)
        seconds = time.perf_counter() - started
    finish(engine, handles)
    events: Any = found.events()
    log.figure("profile.step", 1e3 * seconds / _STEPS, "ms", note=f"{rows} rows, under the profiler")
    log.table("operators by time of the host", _by_name(found.key_averages(), "self_cpu_time_total"))
    if on_gpu:
        _device(log, events, seconds)
        log.table("kernels by time of the device", _by_name(found.key_averages(), "self_device_time_total"))


def _by_name(averages: Any, field: str) -> list[Any]:
    """The names that take most, with their calls and milliseconds a step, and their share."""
    taken = [(float(getattr(one, field)), str(one.key), int(one.count)) for one in averages]
    total = sum(spent for spent, *_ in taken) or 1.0
    rows: list[Any] = [("name", "calls a step", "ms a step", "share")]
    for spent, name, count in sorted(taken, reverse=True)[:_MOST]:
        rows.append(
            (name[:90], round(count / _STEPS, 1), round(spent / 1e3 / _STEPS, 3), round(spent / total, 3))
        )
    return rows


def _device(log: PartLog, events: Any, seconds: float) -> None:
    """Milliseconds a step in which the device computes, and those in which it waits for the host."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    busy = covered(spans) / 1e6
    log.figure("profile.device", 1e3 * busy / _STEPS, "ms", note="some kernel runs")
    log.figure("profile.gaps", 1e3 * (seconds - busy) / _STEPS, "ms", note="no kernel runs: the host is late")
    log.figure("profile.kernels", len(spans) / _STEPS, "kernels a step")


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end), sorted by their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _waits(log: PartLog, step: Callable[[], object]) -> None:
    """The lines at which one step makes the host wait for the device."""
    places: Counter[str] = Counter()
    with _told_of_waits(places):
        step()
    log.figure("profile.waits", sum(places.values()), "waits of the host a step")
    rows: list[Any] = [("line", "times"), *places.most_common(_MOST)]
    log.table("where the host waits for the device", rows)


@contextmanager
def _told_of_waits(places: Counter[str]) -> Iterator[None]:
    def note(*_: Any, **__: Any) -> None:
        frames = [f for f in traceback.extract_stack() if any(part in f.filename for part in _COSERVE)]
        frames = [f for f in frames if "coserve_benchmarks" not in f.filename]
        if frames:
            name = "/".join(frames[-1].filename.split("/")[-2:])
            places[f"{name}:{frames[-1].lineno} {(frames[-1].line or '')[:70]}"] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
