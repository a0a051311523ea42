"""Rows of Parquet files and of folders that `datasets.save_to_disk` wrote; called in a sandbox.

Both expand without bound, and are parsed in C++: a small file may ask for all memory of a machine or end a
process.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError
from coserve.jobs.limits import ReadLimits

_ROWS: Final = 64  # decoded at once
_MOST_SAID: Final = 1000  # characters of a library's error


def column_rows(path: Path, name: str, limits: ReadLimits) -> Iterator[tuple[str, Any]]:
    """(place, row by column) of each row. Columns without a value in a row are left out, and other values are
    those that JSON has. Raises DataError for a file that cannot be read or exceeds a limit."""
    try:
        yield from _bounded(path, name, limits)
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
        RecursionError,
        OverflowError,
    ) as error:
        said = " ".join(str(error)[:_MOST_SAID].split())
        raise DataError(f"{name}: cannot be read: {said}") from None


def _bounded(path: Path, name: str, limits: ReadLimits) -> Iterator[tuple[str, Any]]:
    size = size_of(path)
    most, most_rows, total = limits.most_bytes(size), limits.most_rows(size), 0
    number = 0
    try:
        for batch in _saved(path, limits) if path.is_dir() else _parquet(path, limits, most_rows):
            for start in range(0, batch.num_rows, _ROWS):
                for row in batch.slice(start, _ROWS).to_pylist():
                    number += 1
                    there = {key: value for key, value in row.items() if value is not None}
                    text = msgspec.json.encode(there)  # dates and bytes become texts
                    total += len(text)
                    if len(text) > limits.longest:
                        raise DataError(f"expected at most {limits.longest} bytes: split it")
                    if total > most:
                        raise DataError(f"expected to unpack to at most {most} bytes: split it")
                    if number > most_rows:
                        raise DataError(f"expected at most {most_rows} rows: split the file")
                    yield f"row {number}", msgspec.json.decode(text)
    except DataError as error:
        place = f", row {number}" if number else ""
        raise DataError(f"{name}{place}: {error}") from None


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's tables."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("**/*.arrow")))


def _parquet(path: Path, limits: ReadLimits, most_rows: int) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=False, pre_buffer=False)
    _check(file.schema_arrow, limits)
    if (rows := file.metadata.num_rows) > most_rows:  # known before any is made
        raise DataError(f"expected at most {most_rows} rows; found {rows}: split the file")
    yield from file.iter_batches(batch_size=_ROWS, use_threads=False)


def _saved(folder: Path, limits: ReadLimits) -> Iterator[Any]:
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
            _check(stream.schema, limits)
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


def _check(schema: Any, limits: ReadLimits) -> None:
    if len(schema.names) > limits.columns:
        raise DataError(f"expected at most {limits.columns} columns; found {len(schema.names)}")
    if len(set(schema.names)) < len(schema.names):
        raise DataError("expected different names of columns")
