"""Rows of Parquet files and of folders that `datasets.save_to_disk` wrote, read in a child process.

Both expand without bound, and are parsed in C++: a small file may ask for all memory of a machine or end a
process. The child (`columns_child.py`) has limits of its own and writes JSON lines; this end counts them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import msgspec

from coserve.errors import DataError

MEMORY: Final = 3 * 2**30  # bytes of address space of the child, of which pyarrow's libraries take 0.5
_SECONDS: Final = 60  # seconds of processor time, and one more for each MiB of the file
_MOST_SAID: Final = 2000  # bytes of the child's error
REFUSED: Final = 3  # exit status for a file whose fault is known
NO_MEMORY: Final = 4
NO_END: Final = 5  # exit status for a file that does not end
_ENDS_WITHIN: Final = 10.0  # seconds after its last row
# Only the paths of libraries: the environment may hold keys, and a parser may have a hole.
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "TMPDIR")


def column_rows(path: Path, name: str, longest: int, most: int) -> Iterator[tuple[str, Any]]:
    """(place, row by column) of each row. Columns without a value in a row are left out.

    A row has at most `longest` bytes as JSON, all of them `most`. Raises DataError: for a file that cannot be
    read or exceeds a limit, and where pyarrow is missing.
    """
    if not path.exists():
        raise DataError(f"{name}: cannot be read (No such file or directory)")
    if path.is_dir() and not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"{name}: cannot be read (Is a directory, and not one that datasets.save_to_disk wrote: "
            "state.json is missing)"
        )
    if find_spec("pyarrow") is None:
        raise DataError(f"{name}: reading it needs pyarrow, which coserve[parquet] installs")
    with TemporaryFile() as said:
        child = _start(path, said)
        assert child.stdout is not None
        try:
            total = 0
            lines = iter(partial(child.stdout.readline, longest + 1), b"")
            for number, line in enumerate(lines, 1):
                total += len(line)
                if len(line) > longest:
                    raise DataError(f"{name}, row {number}: expected at most {longest} bytes")
                if total > most:
                    raise DataError(f"{name}, row {number}: expected to unpack to at most {most} bytes")
                if not line.endswith(b"\n"):
                    break  # the child's end, whose status says why
                yield f"row {number}", msgspec.json.decode(line)
            status = _ended(child)
        finally:
            child.kill()
            child.stdout.close()
            child.wait()
        if status:
            said.seek(0)
            raise DataError(f"{name}: {_reason(status, said.read(_MOST_SAID))}")


def _start(path: Path, said: IO[bytes]) -> "subprocess.Popen[bytes]":
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("**/*.arrow")))
    environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve address space in advance
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    limits = [str(MEMORY), str(_SECONDS + size // 2**20)]
    # -P: a module beside the working directory is not ours.
    command = [sys.executable, "-P", "-m", "coserve.jobs.columns_child", str(path), *limits]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, env=environment
    )


def _ended(child: "subprocess.Popen[bytes]") -> int:
    """The status of a child that writes no more."""
    try:
        return child.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        return NO_END


def _reason(status: int, said: bytes) -> str:
    text = " ".join(said.decode(errors="replace").split())
    if status == REFUSED:
        return text
    if status == NO_MEMORY:
        return f"expected to take at most {MEMORY // 2**20} MiB while it is read"
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    return f"cannot be read: its reader ended with {ended}, as for a damaged file or one beyond its limits"
