"""Alternatives: parts that may stand in for others where a request allows it (BlockLLM, 4.4 and 5.2).

An alternative belongs to models by their contents, and has tensors of its own in the zoo's folder of tensors.
It is there once its manifest is; it is no application, and nothing exact is ever made of it.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec

from coserve.errors import ZooError
from coserve.zoo.disk import make_folder, remove_file, sync_folder
from coserve.zoo.manifest import (
    MOST_LAYERS,
    MOST_PLACES,
    SUFFIX,
    Application,
    Count,
    Key,
    Layer,
    Place,
    Plain,
    TensorKeys,
    check_name,
    names_in,
    read_manifest,
    write_manifest,
)

LEAST: Final = 0.9  # similarity with its model that an approximate chain needs to be served
MOST_CHAINS: Final = 64  # of a ladder
_MOST_UNITS: Final = 1 << 20  # heads or neurons of a sublayer
_ChainName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][\w.:~-]{0,139}\Z")]


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

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, msgspec.structs.astuple(self))):
            raise ZooError("a model's distribution is not finite on the text, and nothing compares with it")


class StitchPoint(msgspec.Struct, frozen=True):
    """A place where a chain goes from one model over to another: behind `layers` decoder layers of the first,
    in front of the second's layer `enters`, from 0, and as near as that model as `fidelity` has it."""

    layers: Layer
    enters: Layer
    fidelity: Fidelity


class Stitching(msgspec.Struct, frozen=True, tag="stitching block"):
    """One linear from the width of the model `first` to that of `second`, for all of `points`. `teacher` is
    the larger of the two; `alone` is the smaller one beside it. Trained for `steps` steps."""

    first: str
    second: str
    teacher: str
    tokens: Count
    steps: Count
    seconds: float
    points: Annotated[tuple[StitchPoint, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    alone: Fidelity

    @property
    def models(self) -> set[str]:
        """Names of the models that it belongs to."""
        return {self.first, self.second}

    def __post_init__(self) -> None:
        if self.teacher not in self.models or len(self.models) < 2:
            raise ZooError("a stitching block is of two models, one of them its teacher")


class Pruning(msgspec.Struct, frozen=True, tag="surrogate"):
    """A surrogate of the components `start` to `stop` of `model`: units (heads, or neurons) that are kept, by
    sublayer. `before` is how near the model it is when pruned, `after` when recovered; `similarity` that of
    the vocabulary distributions behind the block itself. Bytes and seconds are of the block and of the
    surrogate; the latter were measured on `machine` with one sequence. Recovered in `steps` steps, 0 where a
    manifest of before does not tell."""

    model: str
    start: Place
    stop: Place
    criterion: Criterion
    kept: Annotated[
        dict[
            Annotated[str, msgspec.Meta(pattern=r"\A[AF][1-9][0-9]{0,3}\Z")],
            Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=_MOST_UNITS)],
        ],
        msgspec.Meta(min_length=1, max_length=MOST_PLACES),
    ]
    before: Fidelity
    after: Fidelity
    similarity: float
    nbytes: tuple[Count, Count]
    seconds: tuple[float, float]
    machine: Plain
    steps: Count = 0

    @property
    def models(self) -> set[str]:
        """Names of the models that it belongs to."""
        return {self.model}

    def __post_init__(self) -> None:
        places = {2 * int(label[1:]) - (label[0] == "A") for label in self.kept}
        if places != {*range(self.start, self.stop)}:
            raise ZooError("a surrogate has the units of other components than its own")
        for label, units in self.kept.items():
            if [*units] != sorted({*units}):
                raise ZooError(f"the units of {label} that a surrogate keeps are not in order")


class ApproximateChain(msgspec.Struct, frozen=True):
    """The chain of a full fine-tune with its foundation's components at `places`. `nbytes` are those of the
    weights that are left of its own, `fidelity` is of the whole chain, the full fine-tune as its teacher."""

    name: _ChainName
    places: Annotated[tuple[Place, ...], msgspec.Meta(min_length=1, max_length=MOST_PLACES)]
    nbytes: Count
    fidelity: Fidelity


class Ladder(msgspec.Struct, frozen=True, tag="ladder of chains"):
    """Approximate chains of the full fine-tune `model`, the most accurate first. Their components of
    `foundation` have a similarity of at least `threshold` each, the chains one of at least `least`. `nbytes`
    and `own` are of the exact chain; all are judged on `tokens` tokens."""

    model: str
    foundation: str
    threshold: float
    least: float
    tokens: Count
    nbytes: Count
    own: Fidelity
    chains: Annotated[tuple[ApproximateChain, ...], msgspec.Meta(max_length=MOST_CHAINS)]

    @property
    def models(self) -> set[str]:
        """Names of the models that it belongs to."""
        return {self.model, self.foundation}


class StoredAlternative(msgspec.Struct, frozen=True):
    """A manifest: `models` are digests of what it belongs to, by name; `tensors` ids by name; `text` the
    SHA-256 of what it was trained or judged on. Raises ZooError for what can be no alternative."""

    name: str
    models: dict[str, Key]
    tensors: TensorKeys
    text: Key
    made: Stitching | Pruning | Ladder

    def __post_init__(self) -> None:
        check_name(self.name)
        if {*self.models} != self.made.models:
            raise ZooError(f"{self.name} belongs to other models than it was made of")
        for model in self.models:
            check_name(model)

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
        return names_in(self._folder)

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
        return self._folder / f"{name}{SUFFIX}"


def check_fits(alternative: StoredAlternative, applications: Mapping[str, Application]) -> None:
    """Raises ZooError where a model that an alternative belongs to is missing, or is another by now."""
    for name, digest in alternative.models.items():
        if name not in applications:
            raise ZooError(f"{alternative.name} belongs to {name}, which is not in the zoo")
        if applications[name].digest != digest:
            raise ZooError(f"{alternative.name} belongs to other weights than {name} has now")
