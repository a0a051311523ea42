"""The bases of one engine."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from coserve.core.request import BASE
from coserve.errors import ConfigError

E = TypeVar("E")


class Bases(Generic[E]):
    """The engines of the bases that share steps, by the bases' ids, the first base's first."""

    def __init__(self) -> None:
        self._engines: dict[str, E] = {}

    def __getitem__(self, base: str) -> E:
        """The engine of the base of this id. Raises ConfigError."""
        if (found := self._engines.get(base)) is None:
            raise ConfigError(f"there is no base {base!r}; there are {', '.join(self._engines)}")
        return found

    def __contains__(self, base: str) -> bool:
        return base in self._engines

    def __iter__(self) -> Iterator[E]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def first(self) -> E:
        """The engine of the first base."""
        return self._engines[BASE]

    def add(self, base: str, engine: E) -> None:
        """Adds a base."""
        self._engines[base] = engine
