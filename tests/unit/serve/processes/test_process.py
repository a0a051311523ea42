"""A child process as its supervisor sees it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from coserve.serve.processes.process import ChildProcess

# Beats, then ends as it is told.
CHILD = """
import ctypes, faulthandler, os, signal, sys
from coserve.wire.child import SupervisorPipes
from coserve.wire.control import Status
faulthandler.enable()
pipes = SupervisorPipes()
pipes.own_crashes()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.signal(signal.SIGINT, signal.SIG_DFL)
pipes.say(Status("ready"))
"""


def end_of(
    folder: Path, code: str, then: Callable[[ChildProcess], Coroutine[Any, Any, object]]
) -> tuple[int, str]:
    """Runs a child until it is ready, does something to it, and returns its exit status and `crash`."""

    async def run() -> tuple[int, str]:
        child = await ChildProcess.start("engine", [sys.executable, "-c", CHILD + code], folder / "log")
        assert (await child.status()) is not None
        await then(child)
        end = await asyncio.wait_for(child.wait(), 60)
        return end.code, end.crash

    return asyncio.run(run())


async def nothing(_: ChildProcess) -> None: ...


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise KeyError('no such tensor')", 1, "KeyError: 'no such tensor'"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("os.abort()", -signal.SIGABRT, "killed by SIGABRT"),
        ("os._exit(1)", 1, "exit status 1"),
    ],
)
def test_a_fault_of_its_own_is_a_crash(code: str, status: int, said: str, tmp_path: Path) -> None:
    found, crash = end_of(tmp_path, code, nothing)
    assert found == status and crash.startswith(said)


def test_one_that_hung_and_was_ended_for_it_crashed(tmp_path: Path) -> None:
    async def abort(child: ChildProcess) -> None:
        await child.abort("it gave no sign of life for 8 s")

    status, crash = end_of(tmp_path, "ctypes.PyDLL(None).sleep(600)", abort)
    assert status in (-signal.SIGABRT, -signal.SIGKILL) and crash == "it gave no sign of life for 8 s"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_that_somebody_ended_did_not(number: signal.Signals, tmp_path: Path) -> None:
    async def end(child: ChildProcess) -> None:
        os.kill(child.pid, number)

    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whatever nohup runs ignores it")
    assert end_of(tmp_path, "signal.pause()", end)[1] == ""


def test_one_that_somebody_stopped_did_not_although_it_was_ended_for_it(tmp_path: Path) -> None:
    async def stop(child: ChildProcess) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        while child.stopped_since(1.0) is None:
            await asyncio.sleep(0.01)
        await child.abort("a signal has stopped it for 5 s")

    status, crash = end_of(tmp_path, "signal.pause()", stop)
    assert status in (-signal.SIGABRT, -signal.SIGKILL) and crash == ""


def test_one_that_was_drained_did_not(tmp_path: Path) -> None:
    async def drain(child: ChildProcess) -> None:
        assert (await child.end(60)).code == 0

    assert end_of(tmp_path, "signal.pause()", drain) == (0, "")


@pytest.mark.parametrize("status", [4, 0])
def test_what_is_stopped_in_its_group_does_not_outlive_it(status: int, tmp_path: Path) -> None:
    """Such as a rank of an engine, which would keep its memory. An end with status 4 is no crash."""
    code = f"""
import subprocess
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.kill(rank.pid, signal.SIGSTOP)
open({str(tmp_path / "rank")!r}, "w").write(str(rank.pid))
os._exit({status})
"""
    assert end_of(tmp_path, code, nothing) == (status, "")
    pid = int((tmp_path / "rank").read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"it is there, in state {state}")
