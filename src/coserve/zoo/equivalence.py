"""Equivalence of components: similarity of their vocabulary distributions on one text (BlockLLM, 4.1).

A measurement is stored beside what it was made with: the contents of both models, and the hash of the text.
It makes alternatives, and merges nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from transformers import PreTrainedModel

from coserve.errors import ZooError
from coserve.text.tokenizer import load_tokenizer, token_ids
from coserve.zoo.chain import model_of
from coserve.zoo.disk import sync_folder
from coserve.zoo.export import exported, loaded
from coserve.zoo.manifest import (
    MOST_LAYERS,
    MOST_PLACES,
    SUFFIX,
    Application,
    Count,
    Key,
    Place,
    names_in,
    read_manifest,
    write_manifest,
)
from coserve.zoo.outputs import component_states, directions
from coserve.zoo.partition import Comparison, PlaceGroup
from coserve.zoo.store import Zoo
from coserve.zoo.text import TEXT

_WINDOW: Final = 256  # tokens run at once
_MOST_TOKENS: Final = 4096  # of a text that are looked at
_BYTES: Final = 512 << 20  # of probabilities at once


_Row = Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class Measurement(msgspec.Struct, frozen=True):
    """The similarities of two models. `digests` are their contents, `groups` the places of components that
    correspond, as (start, stop) in either, with their similarity; `layers` are similarities of each layer
    of the one with each of the other (figure 3)."""

    digests: tuple[Key, Key]
    text: Key
    tokens: Count
    groups: Annotated[
        tuple[tuple[Place, Place, Place, Place, float], ...], msgspec.Meta(max_length=MOST_PLACES)
    ]
    layers: Annotated[tuple[_Row, ...], msgspec.Meta(max_length=MOST_LAYERS)]


def evaluate(zoo: Zoo, one: str, other: str, text: str = TEXT) -> Measurement:
    """Measures how similar the components of two models are, and stores it. Raises ZooError for an adapter,
    for models of other tokenizers, and for a text too short to be run."""
    first, second = model_of(zoo.application(one)), model_of(zoo.application(other))
    if first.tokenizer != second.tokenizer or not first.tokenizer:
        raise ZooError(f"{one} and {other} have mixed tokenizers, or none: their vocabularies do not compare")
    with loaded(zoo, one) as model, loaded(zoo, other) as partner:
        longest = min(_positions(model), _positions(partner))
        windows = _windows(zoo, one, text, min(first.vocabulary, second.vocabulary), longest)
        groups, layers = compare(model, partner, windows)
    found = Measurement(
        (first.digest, second.digest),
        hashlib.sha256(text.encode()).hexdigest(),
        sum(map(len, windows)),
        tuple((*group.one, *group.other, group.similarity) for group in groups),
        layers,
    )
    with zoo.writing():
        write_manifest(zoo.measured / f"{first.digest}-{second.digest}.json", found)
        sync_folder(zoo.measured)
    return found


def compare(
    one: PreTrainedModel, other: PreTrainedModel, windows: Sequence[Sequence[int]]
) -> tuple[tuple[PlaceGroup, ...], tuple[tuple[float, ...], ...]]:
    """Similarities of two models' components, and of all pairs of their layers, on token ids."""
    mine, theirs = component_states(one, windows), component_states(other, windows)
    vocabulary = min(model.config.get_text_config().vocab_size for model in (one, other))
    pairs = corresponding(len(mine), len(theirs))
    count = len(mine[0])
    rows = max(1, _BYTES // (4 * vocabulary * (len(mine) + len(theirs))))
    sums = torch.zeros(len(pairs), dtype=torch.float64)
    layers = torch.zeros((len(mine) - 2) // 2, (len(theirs) - 2) // 2, dtype=torch.float64)
    for start in range(0, count, rows):
        ours = torch.stack([directions(one, state[start : start + rows], vocabulary) for state in mine])
        others = torch.stack([directions(other, state[start : start + rows], vocabulary) for state in theirs])
        for number, (a, b) in enumerate(pairs):
            sums[number] += (ours[a[1] - 1] * others[b[1] - 1]).sum()
        layers += torch.einsum("irv,jrv->ij", ours[2:-1:2], others[2:-1:2])
    groups = tuple(PlaceGroup(a, b, float(sums[number]) / count) for number, (a, b) in enumerate(pairs))
    return groups, tuple(tuple(row) for row in (layers / count).tolist())


def corresponding(one: int, other: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of places of two chains that correspond. Chains of one length correspond place by place; of
    other depth layers are grouped in proportion, such that either chain gives at least one to each group."""
    if one == other:
        return [((place, place + 1), (place, place + 1)) for place in range(one)]
    depths = (one - 2) // 2, (other - 2) // 2
    count = min(depths)
    cuts = [[1 + 2 * (depth * group // count) for group in range(count + 1)] for depth in depths]
    found = [((0, 1), (0, 1))]
    found += [
        ((cuts[0][group], cuts[0][group + 1]), (cuts[1][group], cuts[1][group + 1])) for group in range(count)
    ]
    return [*found, ((one - 1, one), (other - 1, other))]


def measurements(zoo: Zoo, applications: Mapping[str, Application]) -> list[Measurement]:
    """All measurements of models that are in the zoo. Raises ZooError for a damaged measurement."""
    digests = {one.digest for one in applications.values()}
    return [_read(file) for file in _files(zoo) if set(file.stem.split("-")) <= digests]


def damaged_measurements(zoo: Zoo) -> list[str]:
    """Problems of measurements, whose models may be gone; `evaluate` makes them again."""
    problems = []
    for file in _files(zoo):
        try:
            _read(file)
        except ZooError as error:
            problems.append(str(error))
    return problems


def comparisons(zoo: Zoo, applications: Mapping[str, Application]) -> list[Comparison]:
    """The measurements by names of applications. Raises ZooError for a damaged one."""
    named: dict[str, list[str]] = {}
    for one in applications.values():
        named.setdefault(one.digest, []).append(one.name)
    return [
        Comparison(one, other, tuple(PlaceGroup((a, b), (c, d), s) for a, b, c, d, s in measured.groups))
        for measured in measurements(zoo, applications)
        for one in named[measured.digests[0]]
        for other in named[measured.digests[1]]
        if one != other
    ]


def _files(zoo: Zoo) -> list[Path]:
    """Files named by two digests; those named by one are profiles."""
    return [zoo.measured / f"{name}{SUFFIX}" for name in names_in(zoo.measured) if "-" in name]


def _read(file: Path) -> Measurement:
    """The measurement in a file. Raises ZooError for a damaged one, and for one of other models than the
    file is named by."""
    found = read_manifest(file, Measurement)
    if "-".join(found.digests) != file.stem:
        raise ZooError(f"{file} is damaged: it is the measurement of other models")
    return found


def _windows(zoo: Zoo, name: str, text: str, vocabulary: int, longest: int) -> list[list[int]]:
    """The text's tokens in windows of at most `longest`. Raises ZooError."""
    with exported(zoo, name) as folder:
        ids = token_ids(load_tokenizer(folder), text)[:_MOST_TOKENS]
    if not ids or max(ids) >= vocabulary:
        raise ZooError(
            f"the text has {len(ids)} tokens for {name}, or ones beyond its vocabulary of {vocabulary}"
        )
    size = min(_WINDOW, longest)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _positions(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _WINDOW)
