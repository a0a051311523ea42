"""Reads and validates training data: a file or folder in a container of `containers.py`, whose values are
objects of one of the formats in `formats.py`, or such objects themselves."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from coserve.errors import DataError
from coserve.jobs import containers
from coserve.jobs.containers import Place, Values
from coserve.jobs.formats import (
    ANY,
    PREFERENCES,
    PROMPTS,
    SUPERVISED,
    Format,
    PreferenceRecord,
    PromptRecord,
    Record,
    SupervisedRecord,
    detect,
    expected,
)

_MOST_ERRORS: Final = 3
_LOOKED_AT: Final = 1000  # records after the first error in which further ones are looked for

Source = str | Path | Iterable[Mapping[str, Any]]


def read(source: Source, name: str | None = None) -> Iterator[SupervisedRecord]:
    """Records for supervised training, of a file or of dicts in the form of its lines.

    `name` is the source's name in errors, by default the file's name or "data". Raises DataError, which lists
    the first invalid records, at most three, once the first of them is reached.
    """
    return cast(Iterator[SupervisedRecord], _records(source, name, SUPERVISED))


def read_preferences(source: Source, name: str | None = None) -> Iterator[PreferenceRecord]:
    """Preference pairs of a source, as `read` reads examples."""
    return cast(Iterator[PreferenceRecord], _records(source, name, PREFERENCES))


def read_prompts(source: Source, name: str | None = None) -> Iterator[PromptRecord]:
    """Prompts with references of a source, as `read` reads examples."""
    return cast(Iterator[PromptRecord], _records(source, name, PROMPTS))


def read_any(source: Source, name: str | None = None) -> Iterator[Record]:
    """Records of whichever kind the source has, as `read` reads examples."""
    return _records(source, name, ANY)


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


def _records(source: Source, name: str | None, formats: tuple[Format, ...]) -> Iterator[Record]:
    """Records of one format, the first one's."""
    name = name or _name_of(source)
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
                yield record
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
