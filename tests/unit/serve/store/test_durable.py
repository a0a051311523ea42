"""Folders are whole or not there; what a killed server leaves behind goes when the next one starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coserve.serve.processes import supervisor
from coserve.serve.settings import ServerSettings
from coserve.serve.store.durable import link_files


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


@pytest.mark.parametrize("has_links", [True, False])
def test_linked_files_outlive_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    source, folder = tmp_path / "source", tmp_path / "new" / "folder"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_text(name)

    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    if not has_links:
        monkeypatch.setattr("coserve.serve.store.durable.os.link", refuse)
    link_files(source, folder, ("a", "c"))
    assert (folder / "a").samefile(source / "a") is has_links
    shutil.rmtree(source)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"a": "a", "c": "c"}
    with pytest.raises(FileNotFoundError):
        link_files(folder, tmp_path / "other", ("a", "b"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new"]
