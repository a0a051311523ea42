"""A recorded trace for tests of workloads."""

import random
from typing import Final

from coserve.workload.trace_formats import TraceRow


def _trace() -> list[TraceRow]:
    """An hour: one request a second, and twice as many more while seconds 1,100 to 1,140 last."""
    draw = random.Random(0)
    times = [draw.uniform(0.0, 3600.0) for _ in range(3600)]
    times += [draw.uniform(1100.0, 1140.0) for _ in range(80)]
    return [TraceRow(at, draw.randrange(10, 4000), draw.randrange(1, 600)) for at in sorted(times)]


TRACE: Final = _trace()
