"""What a killed server leaves behind goes when the next one starts."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coserve.serve.processes import supervisor
from coserve.serve.settings import ServerSettings


class _Ended(Exception):
    pass


def test_checkpoints_that_were_not_finished_are_swept_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "jobs" / "ftjob-1" / "checkpoints"
    for name in (".step-000010.partial", "step-000005", "step-000004.damaged-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "training.json").write_text("{}")

    def started(*_: Any) -> None:
        raise _Ended

    monkeypatch.setattr(supervisor, "Supervisor", started)
    settings = ServerSettings(model="m", state=tmp_path / "state", port=0)
    with pytest.raises(_Ended):
        supervisor.serve(settings, Console())
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-000004.damaged-1", "step-000005"]
