"""A recorded trace as a request source: arrivals and lengths scaled to this machine and model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from coserve.core.request import SLO
from coserve.demo.lessons import Lesson
from coserve.demo.requests import DemoRequest, adapter_of
from coserve.workload.requests import greedy
from coserve.workload.trace_formats import TraceRow, read_trace
from coserve.workload.traces import ScaledTrace, scale_trace

REQUESTS: Final = 2000  # of the trace; the scales are computed over them once
_STRETCH: Final = 50  # requests over which it is judged how busy a trace is
POSITIONS: Final = 2048  # a model with more is not given longer prompts: the demo is short
PROMPT_SHARE: Final = 0.75  # of the positions, for the longest prompt; the rest is for the longest answer
_STRIDE: Final = 131  # tokens between the beginnings of two prompts in the text they are cut from


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace's requests with lengths that the model takes; arrivals are still as recorded."""

    rows: tuple[TraceRow, ...]
    longest_prompt: int
    longest_answer: int
    skipped: int = 0  # requests of the trace before these

    def at_rate(self, rate: float) -> ScaledTrace:
        """The load at `rate` requests a second on average."""
        seconds = len(self.rows) / rate
        return scale_trace(self.rows, rate, seconds, self.longest_prompt, self.longest_answer)


def read_load(path: Path, positions: int) -> TraceLoad:
    """Part of a trace, its lengths to be scaled to the model's positions. Raises DataError.

    Recordings begin slowly, and a demo is short: the part begins where the trace first has its average rate.
    """
    most = min(positions, POSITIONS)
    prompt = int(most * PROMPT_SHARE)
    rows = read_trace(path)
    begin = _busy_from(rows)
    taken = rows[begin : begin + REQUESTS]
    started = taken[0].at
    return TraceLoad(tuple(replace(row, at=row.at - started) for row in taken), prompt, most - prompt, begin)


def _busy_from(rows: Sequence[TraceRow]) -> int:
    """Index of the first request that is followed by at least the trace's average rate."""
    average = rows[-1].at / len(rows)
    last = len(rows) - _STRETCH
    return next((i for i in range(last) if rows[i + _STRETCH].at - rows[i].at <= _STRETCH * average), 0)


def describe(scaled: ScaledTrace, load: TraceLoad, capacity: float) -> tuple[str, dict[str, Any]]:
    """The scaling of the trace, as a sentence and as figures. `capacity` is in requests a second."""
    recorded = load.rows
    was, now = rate(recorded), rate(scaled.rows)
    said = (
        f"Arrivals, from request {load.skipped + 1} on: {was:.2f} a second as recorded, {now:.2f} here "
        f"(gaps x {scaled.time_scale:.3g}), "
        f"{now / capacity:.0%} of the {capacity:.2f} a second measured as capacity. "
        f"Prompts x {scaled.prompt_scale:.3g}, answers x {scaled.answer_scale:.3g} "
        f"(mean {_mean(r.prompt for r in recorded):.0f} -> {_mean(r.prompt for r in scaled.rows):.0f} and "
        f"{_mean(r.answer for r in recorded):.0f} -> {_mean(r.answer for r in scaled.rows):.0f} tokens)."
    )
    figures = {key: value for key, value in asdict(scaled).items() if key != "rows"}
    return said, {**figures, "skipped": load.skipped, "recorded_rate": was, "rate": now, "capacity": capacity}


def rate(rows: Sequence[TraceRow]) -> float:
    """Requests a second on average: the last of n arrives, on average, at n / (n + 1) of the duration."""
    return len(rows) / max(rows[-1].at * (len(rows) + 1) / len(rows), 1e-9)


def _mean(values: Iterator[int]) -> float:
    found = list(values)
    return sum(found) / len(found)


class TraceRequests:
    """Requests at the times of a scaled trace, which begins again when it runs out.

    A trace has lengths only: prompts are cut from `text`, and answers have the recorded length.
    """

    def __init__(self, load: TraceLoad, text: Sequence[int], lessons: Sequence[Lesson], slo: SLO) -> None:
        self.load, self._text, self._lessons, self._slo = load, text, lessons, slo

    def requests(self, rate: float, seconds: float) -> list[DemoRequest]:
        """See `RequestSource`."""
        rows, found = self.load.at_rate(rate).rows, list[DemoRequest]()
        for number in range(max(1, round(rate * seconds))):
            rounds, index = divmod(number, len(rows))
            found.append(self._request(number, rows[index], rounds * len(rows) / rate + rows[index].at))
        return [request for request in found if request.at < seconds]

    def _request(self, number: int, row: TraceRow, at: float) -> DemoRequest:
        start = number * _STRIDE % len(self._text)
        prompt = tuple(self._text[(start + i) % len(self._text)] for i in range(row.prompt))
        lesson = adapter_of(number, self._lessons)
        name = None if lesson is None else lesson.adapter
        asked = f"[{row.prompt} tokens]"
        return DemoRequest(at, prompt, row.answer, name, self._slo, asked, greedy(row.answer))
