"""Reads and validates training data: a file or folder in a container of `containers.py`, whose values are
objects of one of the formats in `formats.py`, or such objects themselves."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from coserve.errors import DataError
from coserve.jobs import containers
from coserve.jobs.containers import Place, Values
from coserve.jobs.formats import (
    ANY,
    LABELLED,
    PREFERENCES,
    PROMPTS,
    SUPERVISED,
    Format,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    SupervisedRecord,
    detect,
    expected,
)

_MOST_ERRORS: Final = 3
_LOOKED_AT: Final = 1000  # records after the first error that are searched for further ones

Source = str | Path | Iterable[Mapping[str, Any]]
_R = TypeVar("_R", bound=Record)


class Records(Iterator[_R]):
    """Records of a source, one after another. `place` is that of the last one: "train.jsonl, line 7"."""

    def __init__(self, placed: Iterator[tuple[str, _R]]) -> None:
        self.place = ""
        self._placed = placed

    def __next__(self) -> _R:
        self.place, record = next(self._placed)
        return record


def place_of(records: Iterable[object], number: int) -> str:
    """The place of the last of some records in an error: in its source, or its number where it has none."""
    return records.place if isinstance(records, Records) else f"example {number}"


def read(source: Source, name: str | None = None, most: int | None = None) -> Records[SupervisedRecord]:
    """The first `most` records for supervised training, of a file or of dicts in the form of its lines.

    `name` is the source's name in errors, by default the file's name or "data". Raises DataError, which lists
    the first invalid records, at most three, once the first of them is reached.
    """
    return cast(Records[SupervisedRecord], _records(source, name, SUPERVISED, most))


def read_preferences(
    source: Source, name: str | None = None, most: int | None = None
) -> Records[PreferenceRecord]:
    """Preference pairs of a source, as `read` reads examples."""
    return cast(Records[PreferenceRecord], _records(source, name, PREFERENCES, most))


def read_labelled(
    source: Source, name: str | None = None, most: int | None = None
) -> Records[LabelledRecord]:
    """Labelled completions of a source, as `read` reads examples."""
    return cast(Records[LabelledRecord], _records(source, name, LABELLED, most))


def read_prompts(source: Source, name: str | None = None, most: int | None = None) -> Records[PromptRecord]:
    """Prompts with references of a source, as `read` reads examples."""
    return cast(Records[PromptRecord], _records(source, name, PROMPTS, most))


def read_any(source: Source, name: str | None = None) -> Records[Record]:
    """Records of whichever kind the source has, as `read` reads examples."""
    return _records(source, name, ANY, None)


def parse(value: object, formats: tuple[Format, ...] = SUPERVISED) -> Record:
    """The record of one decoded line. Raises DataError, without a place, naming what was expected."""
    found = detect(value, formats)
    assert isinstance(value, Mapping), "a format is found for objects only"
    return found.read(value)


class _Errors:
    """The first errors of a source, which are raised together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def is_full(self) -> bool:
        return len(self._found) >= _MOST_ERRORS

    def add(self, place: Place, error: DataError) -> None:
        self._found.append(f"{self._name}, {place}: {error}")

    def with_those_of(self, values: Values) -> Values:
        """The values up to an error of the whole source, which is raised unless records had errors before."""
        try:
            yield from values
        except DataError as error:
            if not self:
                raise
            self._found.append(str(error))

    def error(self) -> DataError:
        return DataError("\n".join(self._found))


def _records(
    source: Source, name: str | None, formats: tuple[Format, ...], most: int | None
) -> Records[Record]:
    return Records(islice(_placed(source, name or _name_of(source), formats), most))


def _placed(source: Source, name: str, formats: tuple[Format, ...]) -> Iterator[tuple[str, Record]]:
    """Records of one format, the first one's, with their places."""
    errors = _Errors(name)
    first: tuple[Place, Format] | None = None
    is_empty, looked = True, 0
    for place, value in errors.with_those_of(_values(source, name, formats)):
        is_empty = False
        try:
            if isinstance(value, DataError):
                raise value
            found = detect(value, formats)
            first = first or (place, found)
            if found.name != first[1].name:
                raise DataError(f"expected {first[1].name}, as in {first[0]}; found {found.name}")
            record = found.read(cast(Mapping[str, Any], value))
        except DataError as error:
            errors.add(place, error)
        else:
            if not errors:
                yield f"{name}, {place}", record
        looked += bool(errors)
        if errors.is_full or looked > _LOOKED_AT:
            break
    if errors:
        raise errors.error()
    if is_empty:
        raise DataError(f"{name}: expected at least one example; found none")


def _values(source: Source, name: str, formats: tuple[Format, ...]) -> Values:
    if isinstance(source, str | Path):
        return containers.values(Path(source), name, expected(formats))
    return ((f"example {number}", value) for number, value in enumerate(source, 1))


def _name_of(source: Source) -> str:
    return Path(source).name if isinstance(source, str | Path) else "data"
