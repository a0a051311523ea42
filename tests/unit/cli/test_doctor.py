"""`coserve doctor` on the disk from which a base would be streamed."""

import re
from pathlib import Path

import pytest

from coserve.cli import checks
from coserve.cli.checks import Check, Level, run_checks
from coserve.kernels.native import build
from coserve.serve.settings import ServerSettings
from coserve.streamed import scratch
from coserve.streamed.scratch import file_system_of


def test_doctor_says_whether_a_base_can_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state" / "scratch"  # is not there yet

    def found() -> Check:
        settings = ServerSettings(model="m", state=folder.parent, port=0)
        (check,) = (check for check in run_checks(settings) if check.what == "scratch folder")
        return check

    kind = file_system_of(str(tmp_path))
    monkeypatch.setattr(scratch, "_IN_MEMORY", ())
    good = found()
    assert good.level is Level.GOOD
    assert re.fullmatch(rf"{folder}, {kind}, [\d.]+ GB free, read at [\d.]+ GB/s", good.found)
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(checks, "LITTLE_DISK", 1 << 60)
    assert found().level is Level.LACKING and "room" in found().advice
    monkeypatch.setattr(scratch, "_IN_MEMORY", (kind,))
    assert found().level is Level.LACKING and "from memory" in found().advice


def test_doctor_says_why_there_are_no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for problem, level in (("", Level.GOOD), ("gcc took longer than 180 s", Level.LACKING)):
        monkeypatch.setattr(build, "find_problem", lambda problem=problem: problem)
        (check,) = checks._kernels()
        assert check.level is level and problem in check.found and bool(check.advice) is bool(problem)
