"""Forked processes of the tests are to their parent what started ones are."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forking import forked
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

TELL = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv[1:], "name": __name__, "read": sys.stdin.read(), "parent": os.getppid(),
    "folder": os.getcwd(), "colours": [os.environ.get("COLOUR"), os.environ.get("HOME")],
    "given": os.pread(int(sys.argv[1]), 9, 0).decode(), "open": len(os.listdir("/proc/self/fd")),
    "imported": "coserve.engine.process" in sys.modules,
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
SLEEPS = "import time; print('sleeps', flush=True); time.sleep(600)"
# A parent that has forked one, and is killed; and one whose child is forked from it.
FORKS = f"""
import subprocess, sys
import forking
forking._PRELOADED = ("coserve.errors",)  # what is imported makes no difference here
with forking.forked():
    print(subprocess.Popen([sys.executable, "-c", {SLEEPS!r}], stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""


def run(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    with forked():
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, **options
        )


def is_running(pid: str) -> bool:
    """Tells whether it has not ended. Where nothing waits for orphans, as in containers, a zombie stays."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_has_the_streams_descriptors_environment_and_status_of_its_command(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"passed on")
        file.flush()
        number = file.fileno()
        done = run(
            TELL, str(number), "b", input="asked", cwd=tmp_path, pass_fds=[number],
            env={name: value for name, value in os.environ.items() if name != "HOME"} | {"COLOUR": "red"},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, "to stderr\n")
    assert json.loads(done.stdout) == {
        "arguments": [str(number), "b"], "name": "__main__", "read": "asked", "parent": os.getpid(),
        "folder": str(tmp_path), "colours": ["red", None], "given": "passed on", "imported": True,
        "open": 5,  # the folder that is listed too
    }  # fmt: skip


def test_an_exception_is_told_and_a_signal_is_its_status() -> None:
    failed = run("1 / 0")
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run("import os; os.abort()").returncode == -signal.SIGABRT
    assert run("import sys; sys.exit('a reason')").stderr == "a reason\n"


def test_a_kill_ends_it_and_others_see_its_command() -> None:
    with forked():
        process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "sleeps\n"
        assert SLEEPS in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_it_ends_with_the_tests_and_so_does_what_it_was_forked_from() -> None:
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        forks = int(process.stdout.readline())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert str(forks) in children and len(children) == 2
        process.kill()
    wait_until(lambda: not any(map(is_running, children)))


def test_other_values_of_what_is_read_at_import_start_the_command() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert run(code).stdout == "True\n"
    assert run(code, env={**os.environ, "OMP_NUM_THREADS": "3"}).stdout == "False\n"
