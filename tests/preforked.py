"""Processes that begin with the engine's imports done: forked from one that has made them. A start by itself
imports for six seconds; what runs afterwards is the same."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context, set_start_method
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from typing import Any, Final

# A process has one server of forks, so the list has what all tests' forks need.
_PRELOADED: Final = (
    "coserve.engine.process", "coserve.split.service", "coserve.cli.app", "openai", "fastapi",
)  # fmt: skip


def preforking() -> ForkServerContext:
    """A context whose processes have imported the libraries."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


class _Passed:
    """A descriptor that goes along to the process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _arrived, (DupFd(self._number),)


def _arrived(passed: Any) -> int:
    return int(passed.detach())


class Preforked:
    """A call of `main()` with `sys.argv` in a process of its own, which ends with this one. It looks like a
    `subprocess.Popen` whose stdin and stdout are pipes."""

    def __init__(
        self, main: Callable[[], object], argv: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        passed = _Passed(theirs_in), _Passed(theirs_out)
        self._process = preforking().Process(
            target=_run, args=(main, [*argv], dict(environment), *passed), daemon=True
        )
        self._process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a preforked process", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    main: Callable[[], object], argv: list[str], environment: dict[str, str], stdin: int, stdout: int
) -> None:
    for here, number in ((stdin, 0), (stdout, 1)):
        os.dup2(here, number)
        os.close(here)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    set_start_method(None, force=True)  # the system's own, as of a process that was not forked
    main()
    sys.stdout.flush()
