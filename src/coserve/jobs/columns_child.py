"""The process that reads columns: `python -m coserve.jobs.columns_child PATH BYTES SECONDS`.

Writes each row as a line of JSON to stdout, without columns that are null. The process may have BYTES of
address space and SECONDS of processor time; it writes no core, and no file but for stderr.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError
from coserve.jobs.columns import NO_MEMORY, REFUSED

_ROWS: Final = 64  # decoded at once
_MOST_WRITTEN: Final = 2**16  # bytes written to any file, which is stderr alone
_MOST_COLUMNS: Final = 1000


def limit(memory: int, seconds: int) -> None:
    """Bounds this process for the rest of its life."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def rows_of(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Rows of a file or folder, a few at a time. Raises DataError and pyarrow's errors."""
    batches = _saved(path) if path.is_dir() else _parquet(path)
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS).to_pylist()


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=False, pre_buffer=False)
    _check(file.schema_arrow)
    yield from file.iter_batches(batch_size=_ROWS, use_threads=False)


def _saved(folder: Path) -> Iterator[Any]:
    """Batches of a folder that `datasets` saved: those of its files, in the order of state.json."""
    from pyarrow import ipc

    folder = _split_of(folder)
    state = _json(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise DataError('expected "_data_files" in state.json to be a list of objects')
    for entry in files:
        file = entry.get("filename")
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError('expected "filename" in state.json to name a file of the folder')
        with (folder / file).open("rb") as opened, ipc.open_stream(opened) as stream:
            _check(stream.schema)
            yield from stream


def _split_of(folder: Path) -> Path:
    """The folder itself, or its split "train" where it holds several."""
    if not (folder / "dataset_dict.json").is_file():
        return folder
    splits = _json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or "train" not in splits:
        raise DataError(f'expected a split "train", or the folder of one split; found {str(splits)[:100]}')
    return folder / "train"


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise DataError(f"expected {path.name} to be an object")
    return found


def _check(schema: Any) -> None:
    if len(schema.names) > _MOST_COLUMNS:
        raise DataError(f"expected at most {_MOST_COLUMNS} columns; found {len(schema.names)}")
    if len(set(schema.names)) < len(schema.names):
        raise DataError("expected different names of columns")


def main() -> int:
    """Writes the rows; returns the exit status, with the reason of a failure on stderr."""
    path, memory, seconds = sys.argv[1:]
    limit(int(memory), int(seconds))
    out = sys.stdout.buffer
    try:
        for rows in rows_of(Path(path)):
            there = ({key: value for key, value in row.items() if value is not None} for row in rows)
            out.writelines(msgspec.json.encode(row) + b"\n" for row in there)
            out.flush()
    except BrokenPipeError:
        return 0  # the reader is gone
    except MemoryError:
        return NO_MEMORY
    except DataError as error:
        return _refused(str(error))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
        RecursionError,
        OverflowError,
    ) as error:
        return _refused(f"cannot be read: {error}")
    return 0


def _refused(text: str) -> int:
    sys.stderr.write(text[:1000])
    return REFUSED


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a regular exit would flush stdout, and fail where the reader is gone
