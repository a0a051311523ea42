"""The API's process: what it says of the supervisor above it."""

import asyncio
import logging
from typing import cast

import pytest

from coserve.serve import main
from coserve.wire.child import SILENT_SECONDS, SupervisorPipes


class Pipes:
    """Of a supervisor that is silent as it is told, a beat after the other."""

    def __init__(self, *silences: float) -> None:
        self.beats, self.silences = 0, silences

    def beat(self) -> None:
        self.beats += 1
        if self.beats > len(self.silences):
            raise StopIteration

    @property
    def supervisor_silence(self) -> float:
        return self.silences[self.beats - 1]


def said(caplog: pytest.LogCaptureFixture, *silences: float) -> list[str]:
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main._beat(cast(SupervisorPipes, Pipes(*silences))))
    return [record.levelname for record in caplog.records]


def test_a_silent_supervisor_is_told_of_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "BEAT_SECONDS", 0.0)
    silent = SILENT_SECONDS + 1
    assert said(caplog, 0.1, silent, silent, silent, silent, 0.1, 0.2, 0.3) == ["ERROR", "WARNING"]
    assert "no sign of life for 4 s" in caplog.text and "nothing that ends is started again" in caplog.text


def test_a_pause_of_this_process_itself_is_no_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "BEAT_SECONDS", 0.0)
    assert said(caplog, 0.1, 60.0, 0.1, 0.4, 60.0, 0.2) == []
