"""A base executor in a process of its own, and clients in the test's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MAIN: Final = "from coserve.cli.app import main; main()"


@contextmanager
def executor_process(
    model: Path, listen: str, *options: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`coserve executor`, which listens already; killed at the end where it has not ended."""
    command = [sys.executable, "-c", MAIN, "executor", str(model), "--listen", listen, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "linears" in said, f"the executor has ended: {process.wait()}"
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
