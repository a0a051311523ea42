"""Measures a program's peaks by running it in a fresh process, and the messages to and from that."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import AutoConfig

from coserve.errors import ServerError
from coserve.plan.stages import Peaks, Program, Stage
from coserve.plan.subject import Subject
from coserve.wire.control import decode_line, encode_line

_COMMAND: Final = (sys.executable, "-m", "coserve.plan.child")
_PATIENCE: Final = 600.0  # seconds that one measurement may take


class MeasureOrder(msgspec.Struct, frozen=True):
    """A program to measure, and its model, as JSON."""

    model: str
    config: Mapping[str, Any]
    dtype: str
    folder: Path | None
    program: Program
    device: str
    threads: int

    @staticmethod
    def of(subject: Subject, program: Program, device: str, threads: int) -> "MeasureOrder":
        dtype = str(subject.dtype).removeprefix("torch.")
        config = subject.config.to_dict()
        return MeasureOrder(subject.name, config, dtype, subject.folder, program, device, threads)

    def subject(self) -> Subject:
        config = AutoConfig.for_model(**self.config)
        return Subject(self.model, config, getattr(torch, self.dtype), self.folder)


class Measured(msgspec.Struct, frozen=True):
    """Peak bytes by stage, and the name of what was measured."""

    peaks: dict[Stage, int]
    how: str


def measure_peaks(subject: Subject, program: Program, device: str) -> tuple[Peaks, str]:
    """Peaks above the memory of a process that has imported everything and loaded nothing, and the name of
    what was measured. Raises ServerError where the process fails."""
    order = MeasureOrder.of(subject, program, device, torch.get_num_threads())
    try:
        done = subprocess.run(
            _COMMAND, input=encode_line(order) + "\n", capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"measuring {program.name} took over {_PATIENCE:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ServerError(f"measuring {program.name} failed: {said[0]}")
    found = decode_line(done.stdout.splitlines()[-1], Measured)
    return found.peaks, found.how
