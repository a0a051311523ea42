"""A trace of steps: spans with their times, while one is asked for. Else a span costs one comparison."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple

MOST_SPANS: Final = 20_000  # of one trace: some two megabytes of JSON


class TraceSpan(NamedTuple):
    """Work of one thread from `start` for `seconds`, since the trace began; `rows` are those of it."""

    name: str
    thread: str
    start: float
    seconds: float
    rows: int


class StepTrace:
    """The spans of this process, from its creation on, until it is full or `end` is called."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.spans: list[TraceSpan] = []
        self.dropped = 0

    def add(self, name: str, began: float, rows: int) -> None:
        """Adds a span that ends now."""
        if len(self.spans) >= MOST_SPANS:
            self.dropped += 1
            return
        now, thread = time.perf_counter(), threading.current_thread().name
        self.spans.append(TraceSpan(name, thread, began - self.began, now - began, rows))


_active: StepTrace | None = None  # of this process
_NOTHING: Final = nullcontext()


def begin_trace(seconds: float) -> StepTrace:
    """Begins a trace, in the place of one that is there."""
    global _active
    _active = StepTrace(seconds)
    return _active


def end_trace() -> None:
    """Ends the trace, if there is one."""
    global _active
    _active = None


def is_tracing() -> bool:
    """Tells whether there is a trace, for spans whose names take work."""
    return _active is not None


def span(name: str, rows: int = 0) -> AbstractContextManager[None]:
    """Context of what a trace is to show."""
    return _NOTHING if _active is None else _traced(_active, name, rows)


@contextmanager
def _traced(trace: StepTrace, name: str, rows: int) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        trace.add(name, began, rows)
