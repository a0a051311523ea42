"""A base executor in a process of its own, and clients in the test's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from forking import forked

MAIN: Final = "from coserve.cli.app import main; main()"


@contextmanager
def executor_process(
    model: Path, listen: str, *options: str, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`coserve executor`, which listens already; killed at the end where it has not ended."""
    command = [sys.executable, "-c", MAIN, "executor", str(model), "--listen", listen, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    with forked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None and process.stdout is not None
    try:
        said = process.stdout.readline()
        assert b"linears" in said, f"the executor has ended: {process.wait()}"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
