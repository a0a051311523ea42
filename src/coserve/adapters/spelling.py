"""Names of a language model's modules where it stands alone, and where it is the text part of a whole model.

PEFT writes the names that modules have in the model that it was given. For one set of weights there are
several: "model.layers.0" in the language model alone, "model.language_model.layers.0" in a multimodal model
around it, "language_model.model.layers.0" there before transformers 4.52. An adapter's file is read with the
names of the base at hand, whichever it was written with.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import Tensor

from coserve.adapters.patterns import peft_entries, peft_matches
from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Modules
from coserve.errors import AdapterMismatch

_T = TypeVar("_T")
_EXPRESSIONS: Final = ("target_modules", "exclude_modules", "feedforward_modules")
_PATTERNS: Final = ("rank_pattern", "alpha_pattern")
_ALL: Final = "all-linear"


@dataclass(frozen=True, slots=True)
class Spelling:
    """Paths of the decoder, which has the layers, and of the head."""

    decoder: str
    head: str

    def renamed(self, path: str, other: "Spelling") -> str:
        """A module's or parameter's path in this spelling as it is in another; other names as they are."""
        for own, new in ((self.decoder, other.decoder), (self.head, other.head)):
            if f"{path}.".startswith(f"{own}."):
                return f"{new}{path[len(own) :]}"
        return path


# The longest decoders first: what begins with "model.language_model" begins with "model" too.
_KNOWN: Final = tuple(
    Spelling(*names)
    for names in (
        ("language_model.model", "language_model.lm_head"),
        ("model.language_model", "lm_head"),
        ("model.text_model", "lm_head"),
        ("model", "lm_head"),
    )
)


@dataclass(frozen=True, slots=True)
class Renaming:
    """From the spelling of an adapter's file to the base's."""

    file: Spelling
    base: Spelling
    modules: Modules

    def tensor(self, name: str) -> str:
        """Name of a tensor of the file with the base's names."""
        if not name.startswith(PREFIX):
            return name
        return f"{PREFIX}{self.file.renamed(name.removeprefix(PREFIX), self.base)}"

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a configuration that choose the same modules by the base's names. Fields that are no
        names are as they were."""
        paths = {self.base.renamed(path, self.file): path for path in self.modules.paths}
        found: dict[str, Any] = {}
        for name, value in fields.items():
            if name in _EXPRESSIONS and isinstance(value, str) and value.lower() != _ALL:
                matched = peft_matches(name, value, paths) if value else ()
                found[name] = [own for path, own in paths.items() if path in matched] or value
            elif name in _PATTERNS and isinstance(value, dict) and value:
                found[name] = _entries(name, value, paths)
            elif isinstance(value, list):
                found[name] = [self._chosen(name, one) if isinstance(one, str) else one for one in value]
            else:
                found[name] = value
        return found

    def _chosen(self, field: str, name: str) -> str:
        """A path, or the ending of one, by the base's names. PEFT shortens many targets to endings that tell
        them from towers', such as "language_model.layers.0.self_attn.q_proj"; there are none here."""
        if (renamed := self.file.renamed(name, self.base)) != name:
            return renamed
        parts = self.file.decoder.split(".")
        for start in range(1, len(parts)):
            above = ".".join(parts[start:]) + "."
            if name.startswith(above):
                # An ending stays one where a restriction to layers goes by that.
                within = name[len(above) :]
                return within if field in _EXPRESSIONS else f"{self.base.decoder}.{within}"
        return name


def _entries(field: str, patterns: dict[str, _T], paths: Mapping[str, str]) -> dict[str, _T]:
    """The patterns, or where they give other modules something by the base's names, one for each module."""
    given = {paths[path]: value for path, value in peft_entries(field, patterns, paths).items()}
    if given == peft_entries(field, patterns, paths.values()):
        return patterns
    return {f"^{re.escape(path)}$": value for path, value in given.items()}


def renaming_of(names: Iterable[str], modules: Modules) -> Renaming | None:
    """The renaming of a file with tensors of these names; None where they are the base's already."""
    base = Spelling(modules.decoder, modules.head)
    if base not in _KNOWN:
        return None
    paths = [name.removeprefix(PREFIX) for name in names]
    for file in _KNOWN:
        if any(path.startswith(f"{file.decoder}.") for path in paths):
            return None if file == base else Renaming(file, base, modules)
    # Beside the head alone: most spellings have the same name for it.
    if any(path.startswith(f"{base.head}.") for path in paths):
        return None
    heads = (file for file in _KNOWN if any(path.startswith(f"{file.head}.") for path in paths))
    return next((Renaming(file, base, modules) for file in heads), None)


def with_own_names(
    folder: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: Modules
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Fields and tensors of one part of a file, with the names of the base at hand. Raises AdapterMismatch
    for a file that has one tensor by two names."""
    renaming = renaming_of(tensors, modules)
    if renaming is None:
        return fields, tensors
    found: dict[str, Tensor] = {}
    for name, one in tensors.items():
        if (own := renaming.tensor(name)) in found:
            raise AdapterMismatch(f"{folder}: tensor {name!r} is there twice: {own!r} is another name of it")
        found[own] = one
    return renaming.fields(fields), found
