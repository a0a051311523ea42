"""Records of decoded values, with their places; the first errors of a source are raised together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from coserve.errors import DataError
from coserve.jobs.borders import cut_text
from coserve.jobs.containers import Place, Values
from coserve.jobs.formats import (
    TEXTS,
    Format,
    PreferenceRecord,
    Record,
    TextRecord,
    detect,
    with_known_keys,
)
from coserve.jobs.limits import ReadLimits, check_characters, check_size, check_turns
from coserve.jobs.media import check_text_only

_MOST_ERRORS: Final = 3
_LOOKED_AT: Final = 1000  # records after the first error that are searched for further ones
_NAMED_KEYS: Final = 20  # keys that are named
_KEY_CHARACTERS: Final = 60  # characters of such a key


@dataclass(slots=True)
class Seen:
    """Properties of a source: its container, the format of its records, and the keys of these that are not
    read, the first of them."""

    container: str = ""
    format: str = ""
    ignored: dict[str, None] = field(default_factory=dict)


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


def placed(
    values: Values, name: str, formats: tuple[Format, ...], limits: ReadLimits, seen: Seen
) -> Iterator[tuple[Place, Record]]:
    """Records of one of the formats, the first record's, which `seen` is told, as it is keys that are not
    read. Plain texts of more characters than allowed are cut at borders. Raises DataError, which lists the
    first invalid records, at most three, once the first of them is reached."""
    errors = _Errors(name)
    first: tuple[Place, Format] | None = None
    is_empty, looked = True, 0
    for place, value in errors.with_those_of(values):
        is_empty = False
        try:
            if isinstance(value, DataError):
                raise value
            value = with_known_keys(value, formats)
            characters = check_size(value, limits)
            found = detect(value, formats)
            if found.name != TEXTS:
                check_characters(characters, limits)
            first = first or (place, found)
            if found.name != first[1].name:
                raise DataError(
                    f"expected {first[1].name}, as in {first[0]}; found {found.name}: put those into a "
                    "file of their own"
                )
            fields = cast(Mapping[str, Any], value)
            check_text_only(fields)
            record = found.read(fields)
            if isinstance(record, PreferenceRecord):  # its prompt may come from texts
                check_turns({"prompt": record.prompt}, limits.turns)
            seen.format = found.name
            for key in found.ignored(fields):
                if len(seen.ignored) < _NAMED_KEYS:
                    seen.ignored[str(key)[:_KEY_CHARACTERS]] = None
        except DataError as error:
            errors.add(place, error)
        else:
            if not errors:
                yield from ((place, part) for part in _parts(record, limits.characters))
        looked += bool(errors)
        if errors.is_full or looked > _LOOKED_AT:
            break
    if errors:
        raise errors.error()
    if is_empty:
        raise DataError(f"{name}: expected at least one example; found none")


def _parts(record: Record, most: int | None) -> Iterator[Record]:
    if most is None or not isinstance(record, TextRecord):
        yield record
        return
    *before, last = cut_text(record.text, most)
    yield from (TextRecord(part, goes_on=True) for part in before)
    yield TextRecord(last)
