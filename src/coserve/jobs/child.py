"""The functions by which a sandbox reads training data: `coserve.jobs.child:read` (see `datasets.py`)."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError
from coserve.jobs.containers import Place, container_of, values
from coserve.jobs.formats import KINDS, SETS, Record, TextRecord
from coserve.jobs.limits import ReadLimits
from coserve.jobs.placed import Seen, placed

_TOGETHER: Final = 2**18  # bytes of items that are sent at once
ROW: Final = -1
FOUND: Final = -2
IGNORED: Final = -3
Item = tuple[Place, int, bytes]
"""A place; the index of a record's class in `formats.KINDS`, `ROW`, `FOUND` for the names of the container
and the format, before the first record, or `IGNORED` for the last item, the keys of records that were not
read; itself in msgpack."""


def read(
    what: str, path: str, name: str, most: int | None, limits: dict[str, Any]
) -> Iterator[list[Item]] | tuple[int, list[str]]:
    """Reads what is wanted of a file or folder: "rows" for the rows of columns, "count" for the number of its
    records of any format and the keys of these that are not read, or the name of a set in `formats.SETS` for
    the first `most` records of these formats."""
    file, bounds = Path(path), ReadLimits(**limits)
    if what == "rows":
        return _batches(((place, ROW, row) for place, row in values(file, name, bounds)), name)
    seen = Seen()
    if what == "count":
        found = _records(file, name, "any", bounds, seen)
        number = sum(not (isinstance(record, TextRecord) and record.goes_on) for _, record in found)
        return number, list(seen.ignored)
    records = islice(_records(file, name, what, bounds, seen), most)
    return _batches(_items(records, file, seen), name)


def _items(
    records: Iterator[tuple[Place, Record]], path: Path, seen: Seen
) -> Iterator[tuple[Place, int, object]]:
    for number, (place, record) in enumerate(records):
        if not number:
            yield "", FOUND, [container_of(path), seen.format]
        yield place, KINDS.index(type(record)), record
    yield "", IGNORED, list(seen.ignored)


def _records(
    path: Path, name: str, what: str, limits: ReadLimits, seen: Seen
) -> Iterator[tuple[Place, Record]]:
    formats = SETS[what]
    return placed(values(path, name, limits), name, formats, limits, seen)


def _batches(items: Iterator[tuple[Place, int, object]], name: str) -> Iterator[list[Item]]:
    """The items in batches, those before an error too."""
    batch: list[Item] = []
    size = 0
    try:
        for place, kind, value in items:
            batch.append((place, kind, _encoded(value, f"{name}, {place}")))
            size += len(batch[-1][2])
            if size > _TOGETHER:
                yield batch
                batch, size = [], 0
    except DataError:
        yield batch
        raise
    yield batch


def _encoded(value: object, place: str) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        raise DataError(f"{place}: expected whole numbers of at most 64 bits") from None
