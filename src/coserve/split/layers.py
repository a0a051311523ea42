"""The linears that a provider's executor computes; all others stay with the clients."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coserve.errors import ConfigError

_RANGES: Final = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")
_LAYER: Final = re.compile(r"(?:^|.*?\.)[^.]*\.(\d+)\.")  # PEFT's: the first number, not that of an expert


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """`layers` are numbers of layers, as PEFT's `layers_to_transform`, in ranges ("0-11", "0,4-7"), or a
    regular expression for whole paths, as PEFT's `target_modules`; empty for all. The head is in or out by
    `with_head` alone."""

    layers: str = ""
    with_head: bool = True

    def chosen(self, paths: Iterable[str], head: str | None) -> list[str]:
        """Paths of these linears that the executor has; `head` is the output embedding's path, None where
        that is no linear. Raises ConfigError where none is left, or the expression is none."""
        given = list(paths)
        matching = self._matching([path for path in given if path != head])
        found = [path for path in given if path in matching or (path == head and self.with_head)]
        if self.layers and not matching:
            shown = ", ".join(given[:4])
            raise ConfigError(f"--layers {self.layers!r} matches no linear of this model, such as {shown}")
        return found

    def _matching(self, paths: list[str]) -> set[str]:
        if not self.layers:
            return set(paths)
        if _RANGES.fullmatch(self.layers):
            numbers = set[int]()
            for part in self.layers.split(","):
                first, _, last = part.partition("-")
                numbers.update(range(int(first), min(int(last or first), _most(paths)) + 1))
            return {path for path in paths if _layer_of(path) in numbers}
        try:
            return {path for path in paths if re.fullmatch(self.layers, path)}
        except re.error as error:
            raise ConfigError(f"--layers {self.layers!r} is no regular expression: {error}") from error


def _layer_of(path: str) -> int | None:
    found = _LAYER.match(path)
    return int(found[1]) if found else None


def _most(paths: Iterable[str]) -> int:
    """The highest number of a layer, -1 without any."""
    return max((number for path in paths if (number := _layer_of(path)) is not None), default=-1)
