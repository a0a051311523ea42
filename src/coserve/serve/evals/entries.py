"""Files of records for evals: JSON lines with an `item`, and a `sample` where an answer is there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import DataError
from coserve.serve.answering.cost import MOST_SMALL_BODY_BYTES

MOST_ITEMS: Final = 1000  # of one run
Entry = Mapping[str, Any]  # an item, and maybe its sample


def read_entries(path: Path) -> list[Entry]:
    """The records of a JSON-lines file for evals. Raises DataError, naming the line."""
    found = list[Entry]()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_SMALL_BODY_BYTES + 1):
            number += 1
            if len(line) > MOST_SMALL_BODY_BYTES:
                raise DataError(f"line {number} has more than {MOST_SMALL_BODY_BYTES} bytes")
            if not line.strip():
                continue
            try:
                entry = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"line {number} is no JSON: {error}") from error
            if not isinstance(entry, dict) or not isinstance(entry.get("item"), dict):
                raise DataError(f'line {number}: expected an object with an "item", which is an object')
            if not isinstance(entry.get("sample") or {}, dict):
                raise DataError(f'line {number}: expected "sample" to be an object')
            found.append(entry)
            if len(found) > MOST_ITEMS:
                raise DataError(f"the file has more than {MOST_ITEMS} records, and an eval runs over so many")
    if not found:
        raise DataError("the file has no records")
    return found
