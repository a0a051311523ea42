"""Messages to and from a measuring process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig

from coserve.plan.stages import Program, ProgramSize, Stage, System
from coserve.plan.subject import Subject


class MeasureOrder(msgspec.Struct, frozen=True):
    """A program to measure, and its model, as JSON."""

    model: str
    program_name: str
    config: Mapping[str, Any]
    dtype: str
    folder: str | None
    system: System
    load: ProgramSize
    trains: bool
    parts: list[dict[str, Any]]
    keep: str | int
    device: str
    threads: int

    @staticmethod
    def of(subject: Subject, program: Program, device: str, threads: int) -> "MeasureOrder":
        return MeasureOrder(
            model=subject.name,
            program_name=program.name,
            config=subject.config.to_dict(),
            dtype=str(subject.dtype).removeprefix("torch."),
            folder=None if subject.folder is None else str(subject.folder),
            system=program.system,
            load=program.load,
            trains=program.trains,
            parts=[dict(part) for part in program.parts],
            keep=program.keep,
            device=device,
            threads=threads,
        )

    def subject(self) -> Subject:
        folder = None if self.folder is None else Path(self.folder)
        return Subject(self.model, AutoConfig.for_model(**self.config), getattr(torch, self.dtype), folder)

    def program(self) -> Program:
        return Program(self.program_name, self.system, self.load, self.trains, self.parts, self.keep)


class Measured(msgspec.Struct, frozen=True):
    """Peak bytes by stage, and the name of what was measured."""

    peaks: dict[Stage, int]
    how: str
