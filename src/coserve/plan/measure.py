"""Measures a program's peaks by running it in a fresh process."""

import subprocess
import sys
from typing import Final

import torch

from coserve.errors import ServerError
from coserve.plan.messages import Measured, MeasureOrder
from coserve.plan.stages import Peaks, Program
from coserve.plan.subject import Subject
from coserve.wire.control import decode_line, encode_line

_COMMAND: Final = (sys.executable, "-m", "coserve.plan.child")
_PATIENCE: Final = 600.0  # seconds that one measurement may take


def measure_peaks(subject: Subject, program: Program, device: str) -> tuple[Peaks, str]:
    """Peaks above the memory of a process that has imported everything and loaded nothing, and the name of
    what was measured. Raises ServerError where the process fails."""
    found = _run(MeasureOrder.of(subject, program, device, torch.get_num_threads()))
    return found.peaks, found.how


def _run(order: MeasureOrder) -> Measured:
    try:
        done = subprocess.run(
            _COMMAND, input=encode_line(order) + "\n", capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"measuring {order.program_name} took over {_PATIENCE:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ServerError(f"measuring {order.program_name} failed: {said[0]}")
    return decode_line(done.stdout.splitlines()[-1], Measured)
