"""What processes of servers in histories do at their start. Their clocks can jump: `time.time` is ahead by the
seconds in the file that CLOCK_AHEAD names, while the monotonic clock is left alone, as on a machine whose
time of day is set. And they wait for an engine for ENGINE_PATIENCE seconds, as a machine that is busy with
other things may take minutes to start one."""

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

if (_patience := os.environ.get("ENGINE_PATIENCE")) and (
    _link := sys.modules.get("coserve.serve.engine.link")
):
    _link.EngineLink.__init__.__defaults__ = (float(_patience),)
