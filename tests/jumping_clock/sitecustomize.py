"""Has the clock of a server's processes jump: `time.time` is ahead by the seconds in the file that
CLOCK_AHEAD names. The monotonic clock is left alone, as on a machine whose time of day is set."""

import os
import sys
import time

_file = os.environ.get("CLOCK_AHEAD", "")
_real = getattr(time.time, "real", time.time)  # a fork of such a process has it twice


def _time() -> float:
    try:
        with open(_file) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()


_time.real = _real  # type: ignore[attr-defined]
if _file:
    time.time = _time
    for _name, _module in list(sys.modules.items()):  # a fork has modules that have imported the function
        if _name.startswith("coserve") and vars(_module).get("time") is _real:
            _module.time = _time  # type: ignore[attr-defined]
