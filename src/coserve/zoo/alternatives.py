"""Alternatives: parts that may stand in for others where a request allows it (BlockLLM, 4.4 and 5.2).

An alternative belongs to models by their contents, and has tensors of its own in the zoo's folder of tensors.
It is there once its manifest is; it is no application, and nothing exact is ever made of it.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import ZooError
from coserve.zoo.disk import make_folder, remove_file, sync_folder
from coserve.zoo.manifest import Application, check_name, read_manifest, write_manifest

LEAST: Final = 0.9  # similarity with its model that an approximate chain needs to be served
_SUFFIX: Final = ".json"


class Criterion(StrEnum):
    """The importance of a weight; that of a unit is the sum over its weights."""

    TAYLOR = "taylor"  # |w · dL/dw|, of the next-token loss on a text: the change of the loss without it
    MAGNITUDE = "magnitude"  # w²


class Fidelity(msgspec.Struct, frozen=True):
    """Means over the tokens of a text: `similarity`, cosine of the vocabulary distribution and the teacher's;
    `agreement`, share of tokens with the same likeliest next one; `accuracy`, share whose likeliest next one
    is the text's; `loss`, nats by which the text's next token surprises."""

    similarity: float
    agreement: float
    accuracy: float
    loss: float


class StitchPoint(msgspec.Struct, frozen=True):
    """A place where a chain goes from one model over to another: behind `layers` decoder layers of the first,
    in front of the second's layer `enters`, from 0, and as near as that model as `fidelity` has it."""

    layers: int
    enters: int
    fidelity: Fidelity


class Stitching(msgspec.Struct, frozen=True, tag="stitching block"):
    """One linear from the width of the model `first` to that of `second`, for all of `points`. `teacher` is
    the larger of the two; `alone` is the smaller one beside it. Trained for `steps` steps."""

    first: str
    second: str
    teacher: str
    tokens: int
    steps: int
    seconds: float
    points: tuple[StitchPoint, ...]
    alone: Fidelity


class Pruning(msgspec.Struct, frozen=True, tag="surrogate"):
    """A surrogate of the components `start` to `stop` of `model`: units (heads, or neurons) that are kept, by
    sublayer. `before` is how near the model it is when pruned, `after` when recovered; `similarity` that of
    the vocabulary distributions behind the block itself. Bytes and seconds are of the block and of the
    surrogate; the latter were measured on `machine` with one sequence."""

    model: str
    start: int
    stop: int
    criterion: Criterion
    kept: dict[str, tuple[int, ...]]
    before: Fidelity
    after: Fidelity
    similarity: float
    nbytes: tuple[int, int]
    seconds: tuple[float, float]
    machine: str


class ApproximateChain(msgspec.Struct, frozen=True):
    """The chain of a full fine-tune with its foundation's components at `places`. `nbytes` are those of the
    weights that are left of its own, `fidelity` is of the whole chain, the full fine-tune as its teacher."""

    name: str
    places: tuple[int, ...]
    nbytes: int
    fidelity: Fidelity


class Ladder(msgspec.Struct, frozen=True, tag="ladder of chains"):
    """Approximate chains of the full fine-tune `model`, the most accurate first. Their components of
    `foundation` have a similarity of at least `threshold` each, the chains one of at least `least`. `nbytes`
    and `own` are of the exact chain; all are judged on `tokens` tokens."""

    model: str
    foundation: str
    threshold: float
    least: float
    tokens: int
    nbytes: int
    own: Fidelity
    chains: tuple[ApproximateChain, ...]


class StoredAlternative(msgspec.Struct, frozen=True):
    """A manifest: `models` are digests of what it belongs to, by name; `tensors` ids by name; `text` the
    SHA-256 of what it was trained or judged on."""

    name: str
    models: dict[str, str]
    tensors: dict[str, str]
    text: str
    made: Stitching | Pruning | Ladder

    @property
    def kind(self) -> str:
        """Kind of alternative, in words."""
        return str(self.made.__struct_config__.tag)


class AlternativeFolder:
    """The folder of all alternatives' manifests. Writers hold the zoo's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Names of all alternatives, in order."""
        files = self._folder.glob(f"*{_SUFFIX}")
        return sorted(file.name.removesuffix(_SUFFIX) for file in files if not file.name.startswith("."))

    def all(self) -> dict[str, StoredAlternative]:
        """All alternatives by name, in order. Raises ZooError for a damaged manifest."""
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> StoredAlternative:
        """The alternative called `name`. Raises ZooError."""
        check_name(name)
        if name not in (names := self.names()):
            raise ZooError(f"the zoo has no alternative {name!r}; it has {', '.join(names) or 'none'}")
        found = read_manifest(self._file(name), StoredAlternative)
        if found.name != name:
            raise ZooError(f"{self._file(name)} is damaged: it is the manifest of {found.name!r}")
        return found

    def of_model(self, model: str) -> list[str]:
        """Names of the alternatives that belong to a model. Raises ZooError for a damaged manifest."""
        return [one.name for one in self.all().values() if model in one.models]

    def ladder_of(self, model: str) -> StoredAlternative | None:
        """The ladder of a full fine-tune, which has one at most. Raises ZooError for a damaged manifest."""
        own = (one for one in self.all().values() if isinstance(one.made, Ladder) and one.made.model == model)
        return next(own, None)

    def write(self, alternative: StoredAlternative) -> None:
        """Adds an alternative whose tensors are stored, for good. Raises OSError."""
        make_folder(self._folder)
        write_manifest(self._file(alternative.name), alternative)
        sync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Removes an alternative. Raises OSError."""
        remove_file(self._file(name))
        sync_folder(self._folder)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def check_fits(alternative: StoredAlternative, applications: Mapping[str, Application]) -> None:
    """Raises ZooError where a model that an alternative belongs to is missing, or is another by now."""
    for name, digest in alternative.models.items():
        if name not in applications:
            raise ZooError(f"{alternative.name} belongs to {name}, which is not in the zoo")
        if applications[name].digest != digest:
            raise ZooError(f"{alternative.name} belongs to other weights than {name} has now")
