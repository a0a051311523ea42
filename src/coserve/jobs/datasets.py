"""Reads and validates training data: a file or folder in a container of `containers.py`, whose values are
objects of one of the formats in `formats.py`, or such objects themselves.

Files are a tenant's, and are read in a sandbox (`child.py`): a small one may unpack or parse without end.
What arrives here is bounded and valid. Objects in memory are the caller's own, and are read here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from coserve.errors import DataError, InternalError, LimitExceeded
from coserve.jobs.child import FOUND, IGNORED, Item
from coserve.jobs.columns import size_of
from coserve.jobs.containers import Place, has_columns
from coserve.jobs.formats import (
    KINDS,
    SETS,
    SUPERVISED,
    Format,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    SupervisedRecord,
    detect,
    with_known_keys,
)
from coserve.jobs.limits import LIMITS, ReadLimits
from coserve.jobs.placed import Seen, placed
from coserve.sandbox.pool import Cancellation, SandboxPool
from coserve.sandbox.process import Sandbox

_CHILD: Final = "coserve.jobs.child:read"
_MEMORY: Final = 3 * 2**30  # bytes of address space of a reader, of which pyarrow's libraries take 0.5
_READERS: Final = 16  # at once; more wait
# Of a beginning: records that are read whatever time they take, and seconds after which no more are.
_LEAST: Final = 16
BEGINNING_SECONDS: Final = 5.0

Source = str | Path | Iterable[Mapping[str, Any]]
_R = TypeVar("_R", bound=Record)
Given = TypeVar("Given")
Made = TypeVar("Made")


class Records(Iterator[_R]):
    """Records of a source, one after another: all, or with `most` the beginning, at most so many and what is
    asked for within `seconds`, 16 at least. `place` is that of the last one: "train.jsonl, line 7".

    Once there are no more `seen` has the keys that were not read, and `is_whole` tells whether these were
    all records.
    """

    def __init__(
        self,
        records: Iterator[tuple[Place, _R]],
        name: str,
        seen: Seen,
        most: int | None,
        seconds: float,
    ) -> None:
        self.place = ""
        self.seen, self.is_whole = seen, False
        self._records, self._name, self._most = records, name, most
        self._number, self._until = 0, time.monotonic() + seconds

    def __next__(self) -> _R:
        if self._most is not None and self._number >= _LEAST and time.monotonic() > self._until:
            raise StopIteration
        try:
            place, record = next(self._records)
        except StopIteration:
            self.is_whole = self._most is None or self._number < self._most
            raise
        self._number += 1
        self.place = f"{self._name}, {place}"
        return record


def place_of(records: Iterable[object], number: int) -> str:
    """The place of the last of some records in an error: in its source, or its number where it has none."""
    return records.place if isinstance(records, Records) else f"example {number}"


def each_made(records: Iterable[Given], make: Callable[[Given], Made]) -> Iterator[tuple[Made, str]]:
    """Yields the outcome of `make` for each record, and the record's place, which a DataError of `make` then
    names."""
    for number, record in enumerate(records, 1):
        try:
            made = make(record)
        except DataError as error:
            raise DataError(f"{place_of(records, number)}: {error}") from error
        yield made, place_of(records, number)


@dataclass(frozen=True, slots=True)
class RecordReader(Generic[_R]):
    """Reads the records of one of the sets of formats (`formats.SETS`)."""

    what: str

    def __call__(
        self,
        source: Source,
        name: str | None = None,
        most: int | None = None,
        limits: ReadLimits = LIMITS,
        seconds: float = BEGINNING_SECONDS,
    ) -> Records[_R]:
        """The records of a file, or of dicts in the form of its lines. With `most` only the beginning is
        read: so many records, or those that were read within `seconds`, 16 at least.

        `name` is the source's name in errors, by default the file's name or "data". Raises DataError, which
        lists the first invalid records, at most three, once the first of them is reached.
        """
        return cast(Records[_R], _records(source, name, self.what, most, limits, seconds))


read: Final[RecordReader[SupervisedRecord]] = RecordReader("supervised")
read_preferences: Final[RecordReader[PreferenceRecord]] = RecordReader("preferences")
read_labelled: Final[RecordReader[LabelledRecord]] = RecordReader("labelled")
read_prompts: Final[RecordReader[PromptRecord]] = RecordReader("prompts")


def count(
    path: Path, name: str, limits: ReadLimits = LIMITS, cancellation: Cancellation | None = None
) -> int:
    """The number of records in a file, as `survey` has it."""
    return survey(path, name, limits, cancellation)[0]


def survey(
    path: Path, name: str, limits: ReadLimits = LIMITS, cancellation: Cancellation | None = None
) -> tuple[int, tuple[str, ...]]:
    """The number of records in a file, all of which are checked, and the first of their keys that are not
    read. Raises DataError; `cancellation` ends the work, which raises it too."""
    with _reader(path, name) as sandbox, (cancellation or Cancellation()).of(sandbox):
        arguments = "count", str(path), name, None, asdict(limits)
        number, ignored = sandbox.call(*arguments, seconds=limits.most_seconds(size_of(path)))
    return int(number), tuple(map(str, ignored))


def read_rows(path: Path, name: str, limits: ReadLimits = LIMITS) -> Iterator[dict[str, Any]]:
    """Rows of a file or folder of columns, by column, whatever they hold. Raises DataError."""
    for _, _, data in _streamed("rows", path, name, None, limits):
        yield msgspec.msgpack.decode(data)


def parse(value: object, formats: tuple[Format, ...] = SUPERVISED) -> Record:
    """The record of one decoded line. Raises DataError, without a place, naming what was expected."""
    value = with_known_keys(value, formats)
    found = detect(value, formats)
    assert isinstance(value, Mapping), "a format is found for objects only"
    return found.read(value)


def _records(
    source: Source, name: str | None, what: str, most: int | None, limits: ReadLimits, seconds: float
) -> Records[Record]:
    seen = Seen()
    if isinstance(source, str | Path):
        path = Path(source)
        name = name or path.name
        found = _decoded(path, name, what, most, limits, seen)
    else:
        name = name or "data"
        values = ((f"example {number}", value) for number, value in enumerate(source, 1))
        found = islice(placed(values, name, SETS[what], limits, seen), most)
    return Records(found, name, seen, most, seconds)


def _decoded(
    path: Path, name: str, what: str, most: int | None, limits: ReadLimits, seen: Seen
) -> Iterator[tuple[Place, Record]]:
    """Records that a sandbox reads; `seen` is told what it found."""
    decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
    for place, kind, data in _streamed(what, path, name, most, limits):
        if kind == IGNORED:
            seen.ignored.update(dict.fromkeys(msgspec.msgpack.decode(data)))
        elif kind == FOUND:
            seen.container, seen.format = msgspec.msgpack.decode(data)
        else:
            yield place, decoders[kind].decode(data)


def _streamed(what: str, path: Path, name: str, most: int | None, limits: ReadLimits) -> Iterator[Item]:
    with _reader(path, name) as sandbox:
        arguments = what, str(path), name, most, asdict(limits)
        for batch in sandbox.stream(*arguments, seconds=limits.most_seconds(size_of(path))):
            yield from batch


@contextmanager
def _reader(path: Path, name: str) -> Iterator[Sandbox]:
    """A sandbox that reads the file or folder. Raises DataError where it cannot be read, also for what is
    raised in the context."""
    _check_there(path, name)
    is_columns = has_columns(path)
    try:
        # A new process for columns, whose libraries keep memory.
        with Sandbox(_CHILD, _MEMORY) if is_columns else _readers().lease() as sandbox:
            yield sandbox
    except LimitExceeded as error:
        raise DataError(f"{name}: cannot be read: {error}") from error
    except InternalError as error:
        if not is_columns:
            raise
        raise DataError(f"{name}: cannot be read: its reader failed with {error}") from error


def _check_there(path: Path, name: str) -> None:
    if not path.exists():
        raise DataError(f"{name}: cannot be read (No such file or directory)")
    if path.is_dir() and not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"{name}: cannot be read (Is a directory, and not one that datasets.save_to_disk wrote: "
            "state.json is missing)"
        )
    if has_columns(path) and find_spec("pyarrow") is None:
        raise DataError(f"{name}: reading it needs pyarrow, which coserve[parquet] installs")


@cache
def _readers() -> SandboxPool:
    """The readers of this process, which are kept for the next file."""
    return SandboxPool(_CHILD, _READERS, _MEMORY)
