"""A base executor in a process of its own, and clients in the test's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coserve.cli.app import main
from preforked import Preforked

MAIN: Final = "from coserve.cli.app import main; main()"


@contextmanager
def executor_process(model: Path, listen: str, *options: str, **environment: str) -> Iterator[Preforked]:
    """`coserve executor`, which listens already; killed at the end where it has not ended."""
    command = ["coserve", "executor", str(model), "--listen", listen, *options]
    process = Preforked(main, command, os.environ | {"OMP_NUM_THREADS": "1"} | environment)
    try:
        said = process.stdout.readline()
        assert b"linears" in said, f"the executor has ended: {process.wait()}"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
